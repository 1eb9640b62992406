"""Generative retrieval with semantic IDs: modules, batch shuffler, gin configurables, and entry point."""

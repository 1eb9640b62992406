"""The semantic-ID generative retrieval model: modules, batch shuffler, gin configurables and entry point."""

"""Benchmarks and their last results."""

"""Benchmarks and their latest results."""

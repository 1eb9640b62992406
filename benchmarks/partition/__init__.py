"""Benchmarks of the partition algorithms: their balance, their moves, and their time."""

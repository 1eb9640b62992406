"""Micro-batches under a token cap: how well they are balanced, and what planning them takes."""

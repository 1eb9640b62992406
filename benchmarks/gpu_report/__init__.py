"""One command that checks two GPUs, trains on them, and writes a report."""

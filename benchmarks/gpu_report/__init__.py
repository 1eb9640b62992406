"""One command for a stranger with two GPUs: check, train, report."""

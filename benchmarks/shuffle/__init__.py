"""`make bench-shuffle`: what the shuffle stage costs, and what it moves."""

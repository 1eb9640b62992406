"""`make bench-lookups`: training steps in which embedding lookups take a share, by partitioner."""

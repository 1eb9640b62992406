"""A check that repeats the tests' CPU checks on one or several GPUs."""

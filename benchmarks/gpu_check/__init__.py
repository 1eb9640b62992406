"""Checks on one or several GPUs what the tests check on CPUs."""

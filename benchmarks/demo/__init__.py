"""`make demo`: the gain of balancing, measured on this machine."""

"""`make demo`: what balancing gains, measured on the machine at hand."""

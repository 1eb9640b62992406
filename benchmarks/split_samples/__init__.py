"""Steps in which samples are cut into pieces."""

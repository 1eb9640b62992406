"""Entry points of the HSTU models, and the settings in their gin files."""

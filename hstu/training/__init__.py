"""Entry points of the HSTU models and what their gin files say."""

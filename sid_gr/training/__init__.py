"""Entry point of the SID-GR model and what its gin files say."""

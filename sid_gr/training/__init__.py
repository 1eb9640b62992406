"""Entry point of the SID-GR model, and the settings in its gin files."""

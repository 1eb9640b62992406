"""HSTU models: modules, batch shuffler, gin configurations, and entry points."""

"""Optional parts. Each imports the core, which imports none of them; without a folder, the rest works."""

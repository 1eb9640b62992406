"""What is measured, and the last measured figures."""

"""The partition algorithms: how well they balance, what they move, and how long they take."""

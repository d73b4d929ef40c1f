"""Rules and settings against the worst of many attacks."""

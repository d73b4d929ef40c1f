"""A model trained on several nodes, private and robust."""

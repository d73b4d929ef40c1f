"""A public table of private, robust training, and ours beside it."""

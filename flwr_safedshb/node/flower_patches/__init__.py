"""Changes to Flower's own programs, which make a node faster."""

"""Measurements against peers and against the floor of the same machine."""

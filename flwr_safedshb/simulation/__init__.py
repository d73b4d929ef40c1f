"""Grids that simulate nodes, and adversaries among them."""

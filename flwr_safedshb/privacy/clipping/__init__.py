"""Clipped sums of per-example gradients."""

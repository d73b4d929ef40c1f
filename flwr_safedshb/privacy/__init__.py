"""Sampling, clipping, noise, and the accountant that is true for them."""

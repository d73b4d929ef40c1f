"""Epsilon of the accountant, held against another computation of it."""

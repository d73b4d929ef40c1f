"""Faults while a real federation trains, and what must hold after each of them."""

"""Private evaluation, attacked."""

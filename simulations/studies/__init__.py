"""Studies that answer a question with many runs."""

"""Where batches and noise come from."""

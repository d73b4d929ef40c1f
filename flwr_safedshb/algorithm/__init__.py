"""A client's half of Algorithm 1: where the private data are."""

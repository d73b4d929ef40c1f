"""Experiments, demonstrations and benchmarks built on flwr_safedshb."""

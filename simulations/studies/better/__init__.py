"""Rules and settings that might keep more of a training than SMEA does."""

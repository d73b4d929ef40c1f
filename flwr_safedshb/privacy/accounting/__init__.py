"""Privacy accounting: the epsilon of the mechanism that ran."""

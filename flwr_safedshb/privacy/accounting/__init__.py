"""What a history of steps costs: epsilon for the mechanism that ran."""

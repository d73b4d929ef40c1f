"""Other rules, tasks and federations than the paper's."""

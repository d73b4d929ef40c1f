"""The server's half of Algorithm 1: screening, aggregation, the step."""

"""The gate: what of a SuperLink nodes can reach."""

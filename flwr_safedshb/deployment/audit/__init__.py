"""A node under attack: odd messages, odd examples, and what its answers give away."""

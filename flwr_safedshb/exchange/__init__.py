"""Which arrays cross the wire, and how they are read and written on both sides."""

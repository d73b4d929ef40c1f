"""What operators run: the node service, its doctor, and the gate of a SuperLink."""

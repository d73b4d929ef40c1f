"""What nodes and servers run besides training: gate, workers, doctor."""

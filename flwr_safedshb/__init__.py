"""Safe-DSHB for Flower: private against the server, robust against f of n clients."""

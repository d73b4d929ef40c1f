"""The ledger: a node's privacy budget, kept on disk."""

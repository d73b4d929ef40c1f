"""Whether a node is fit to join a run, asked before it joins.

Nothing here is charged, released, created or changed: the ledger is read from a copy,
and the one private gradient that is computed is thrown away.
"""

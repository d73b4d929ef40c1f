"""Attacks on our own privacy code: what a hostile server or hostile data could reach.

`search` looks for the example that moves a clipped sum the most, `label` tries to read
a label out of releases, `plans` asks a ledger for every odd plan, and `timing` compares
the times of steps. None of them proves anything by finding nothing.
"""

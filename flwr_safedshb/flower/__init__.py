"""What is particular to Flower: its undocumented names, its networks.

Flower may change what it does not document. Whoever comes into this room passes a check
that it has not; if it has, the import fails and says with which version.
"""

from flwr_safedshb.flower.self_check import check

check()

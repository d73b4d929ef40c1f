"""What the core needs of Flower's private names, its Grids, and patches of its Grid.

Flower may change what it does not document. Importing this package checks that it has
not; if it has, the import fails and names the version.
"""

from flwr_safedshb.flower.self_check import check

check()

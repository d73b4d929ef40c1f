"""Safe-DSHB for Flower: private against the server, robust against f of n clients.

Public names are loaded when they are first used, so that a server that only aggregates
does not wait for torch, and a client not for numba. ``__init__.pyi`` is their list.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

import hashlib
import itertools
import os

import pytest
import torch
from hypothesis import settings

# Small steps on two threads of a shared machine are many times slower than on one.
torch.set_num_threads(1)

# The same examples in every run: a test that passed does not fail for another's change.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture
def fixed_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the operating system's entropy the same in every run of a test."""
    counter = itertools.count()

    def urandom(size: int) -> bytes:
        return hashlib.shake_128(str(next(counter)).encode()).digest(size)

    monkeypatch.setattr(os, "urandom", urandom)

import hashlib
import itertools
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import flwr.common  # noqa: F401  # which sets up the logger
import pytest
import torch
from hypothesis import settings

from flwr_safedshb.cli import _forecast
from flwr_safedshb.privacy.accounting import baselines
from flwr_safedshb.privacy.samplers import get_sampler
from tests.phishing import StandIn, write_stand_in

pytest_plugins = ["tests.guard"]

# Small steps on two threads of a shared machine are many times slower than on one, so
# only `make portable` asks for more.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

# The same examples in every run: a test that passed does not fail for another's change.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

# What the user has; tests that want it say so by `real_phishing`.
_DATA = os.environ.get("SAFEDSHB_DATA")


@pytest.fixture(scope="session", autouse=True)
def no_data_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Leave no test, and no process of a test, a file or a cache outside the clone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SAFEDSHB_DATA", raising=False)
        patch.setenv("SAFEDSHB_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    """Return a small file in the format of LIBSVM's phishing data."""
    return write_stand_in(tmp_path_factory.mktemp("stand-in"))


@pytest.fixture(scope="session")
def real_phishing() -> Path:
    """Return LIBSVM's own file, or skip the test."""
    if _DATA is None or not (file := Path(_DATA) / "phishing").is_file():
        pytest.skip("needs LIBSVM's file phishing in the folder SAFEDSHB_DATA")
    return file


_LOGGER = logging.getLogger("flwr")
_LOG_STATE = _LOGGER.level, _LOGGER.disabled, _LOGGER.propagate


@pytest.fixture(autouse=True)
def flowers_log_as_it_was() -> None:
    """Undo what a command, in a test or a fixture of any scope, did to Flower's log."""
    level, _LOGGER.disabled, _LOGGER.propagate = _LOG_STATE
    _LOGGER.setLevel(level)


@pytest.fixture
def shipped_samplers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide samplers that were added, from what is compared with a list of all."""
    shipped = {name: get_sampler(name) for name in ("fixed", "poisson", "whole")}
    for module in (_forecast, baselines):
        monkeypatch.setattr(module, "load_samplers", lambda: shipped)


@pytest.fixture
def fixed_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the operating system's entropy the same in every run of a test."""
    counter = itertools.count()

    def urandom(size: int) -> bytes:
        return hashlib.shake_128(str(next(counter)).encode()).digest(size)

    monkeypatch.setattr(os, "urandom", urandom)

"""A shortcut does what it stands for, and the benchmark puts each one back."""

from collections.abc import Iterator

import numpy as np
import pytest

from flwr_safedshb.algorithm import wire as arrays
from flwr_safedshb.flower import compat
from flwr_safedshb.simulation.in_process import InProcessGrid
from flwr_safedshb.strategy import SafeDSHB
from simulations.benchmarks import shortcuts
from tests.federation import federation, flat, model

NAMES = {name for functions in shortcuts.DOCUMENTED.values() for name in functions}


@pytest.fixture
def kept() -> Iterator[None]:
    before = {name: getattr(compat, name) for name in NAMES}
    yield
    shortcuts.use(before)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("name", shortcuts.DOCUMENTED)
def test_the_same_model_without_the_shortcut(name: str) -> None:
    def trained() -> bytes:
        return flat(SafeDSHB(seed=0).start(federation(3), model(), 3).arrays).tobytes()

    expected = trained()
    assert np.frombuffer(expected).any()
    shortcuts.use(shortcuts.DOCUMENTED[name])
    assert trained() == expected


def test_functions_are_replaced_where_they_are_used_and_put_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = compat.replace_entries_unchecked
    seen = []

    def timed(kind: type[InProcessGrid], nodes: int, rounds: int) -> float:
        seen.append(
            (
                vars(arrays)["replace_entries_unchecked"] is before,
                compat.replace_entries_unchecked is before,
            )
        )
        return 1.0 if seen[-1] == (True, True) else 1.5

    monkeypatch.setattr(shortcuts, "seconds_of_a_round", timed)
    shortcuts.main(repeats=1)
    assert seen == [(True, True), (False, False), (True, True), (True, True)] * 2
    assert compat.replace_entries_unchecked is before
    assert "without replace_entries_unchecked: +50 %" in capsys.readouterr().out

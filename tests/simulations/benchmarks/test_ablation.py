"""A shortcut does what it stands for, and the benchmark puts each one back."""

import pytest

from flwr_safedshb.algorithm import wire
from flwr_safedshb.flower import compat
from flwr_safedshb.simulation.in_process import InProcessGrid
from flwr_safedshb.strategy import SafeDSHB
from simulations.benchmarks import ablation
from simulations.benchmarks.ablation import SHORTCUTS, replace_functions
from tests.federation import federation, flat, model


def train() -> bytes:
    return flat(SafeDSHB(seed=0).start(federation(3), model(), 3).arrays).tobytes()


@pytest.mark.parametrize("name", SHORTCUTS)
def test_the_model_is_the_same_without_the_shortcut(name: str) -> None:
    expected = train()
    assert any(expected)
    with replace_functions(SHORTCUTS[name]):
        assert train() == expected


def test_each_shortcut_is_replaced_where_it_is_used_and_put_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = compat.replace_entries_unchecked
    seen = []

    def time_round(kind: type[InProcessGrid], nodes: int, rounds: int) -> float:
        used = vars(wire)["replace_entries_unchecked"] is original
        seen.append((used, compat.replace_entries_unchecked is original))
        return 1.0 if used else 1.5

    monkeypatch.setattr(ablation, "time_round", time_round)
    ablation.main(repeats=1)
    assert seen == [(True, True), (False, False), (True, True), (True, True)] * 2
    assert compat.replace_entries_unchecked is original
    assert "without replace_entries_unchecked: +50 %" in capsys.readouterr().out


def test_a_shortcut_that_was_renamed_is_an_error_and_not_a_silent_zero() -> None:
    renamed = {"flwr_safedshb.flower.compat:renamed": lambda: None}
    with pytest.raises(AttributeError, match="renamed"), replace_functions(renamed):
        pass

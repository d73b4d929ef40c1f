"""Several steps in one message: what a node sends, keeps and is charged for them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_safedshb.algorithm.refusal import RefusedError
from tests.clients import THETA, Scalar, ledger, make, node, same

RATE = 0.3


def ask(
    context: object, step: int, count: int | None = None, **more: Scalar
) -> list[np.ndarray]:
    config: dict[str, Scalar] = {"step": step, "momentum": 0.5, "session": "run"}
    if count is not None:
        config |= {"local-steps": count, "learning-rate": RATE}
    return make(context).fit([*more.pop("theta", THETA)], {**config, **more})[0]  # type: ignore[arg-type, misc]


@pytest.mark.parametrize("durable", [False, True])
def test_several_steps_are_those_of_as_many_messages(
    tmp_path: Path, durable: bool
) -> None:
    """The mean of K momentums, each at the weights to which the last has led."""
    alone = node(tmp_path / "a" if durable else None)
    context = node(tmp_path / "b" if durable else None)
    for start, count in ((0, 3), (3, 2)):
        weights, momentums = THETA, []
        for step in range(start, start + count):
            momentums.append(ask(alone, step, theta=weights))  # type: ignore[arg-type]
            pairs = zip(weights, momentums[-1], strict=True)
            weights = [
                (w.astype(float) - RATE * m.astype(float)).astype(np.float32)
                for w, m in pairs
            ]
        sent = ask(context, start, count)
        for layer, found in enumerate(sent):
            expected = np.mean([m[layer].astype(float) for m in momentums], axis=0)
            assert np.allclose(found, expected, rtol=1e-6, atol=0)
            assert found.dtype == np.float32


def test_one_step_is_what_it_was_to_the_byte(tmp_path: Path) -> None:
    contexts = node(), node()
    for step in range(3):
        assert same(ask(contexts[0], step, 1), ask(contexts[1], step))


def test_all_steps_are_charged_at_once_and_before_the_first(tmp_path: Path) -> None:
    context = node(tmp_path)
    ask(context, 0, 4)
    assert [c.steps for c in ledger(tmp_path).charges()] == [4]
    with pytest.raises(RefusedError, match="budget"):
        ask(context, 4, 1000)
    assert [c.steps for c in ledger(tmp_path).charges()] == [4]


def test_a_round_that_is_asked_for_again_starts_from_the_same(tmp_path: Path) -> None:
    context = node(tmp_path)
    ask(context, 0, 3)
    assert same(ask(context, 3, 3), ask(context, 3, 3))


@pytest.mark.parametrize("count", [0, -1, 1001, 10**9, 2.0, True, "3"])
def test_a_number_of_steps_that_nobody_takes_is_refused(
    tmp_path: Path, count: object
) -> None:
    with pytest.raises(RefusedError, match="local-steps"):
        ask(node(tmp_path), 0, count)  # type: ignore[arg-type]
    assert ledger(tmp_path).charges() == []


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan"), "1"])
def test_a_rate_that_is_none_is_refused(tmp_path: Path, rate: Scalar) -> None:
    with pytest.raises(RefusedError, match="learning-rate"):
        ask(node(tmp_path), 0, 2, **{"learning-rate": rate})
    assert ledger(tmp_path).charges() == []


def test_a_rate_that_leads_nowhere_is_answered(tmp_path: Path) -> None:
    """The weights are the server's own affair; the node answers, and is private."""
    context = node(tmp_path)
    sent = ask(context, 0, 3, **{"learning-rate": 1e300})
    assert [layer.shape for layer in sent] == [(1, 3), (1,)]


def test_a_simulation_keeps_to_its_budget() -> None:
    settings: dict[str, Any] = {"max_epsilon": 10.0, "delta": 1e-5}
    config = {"step": 0, "momentum": 0.5, "learning-rate": RATE, "local-steps": 1000}
    with pytest.raises(RefusedError, match="step 999 would exceed"):
        make(node(), **settings).fit([*THETA], config)

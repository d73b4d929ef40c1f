"""The last lines of a run, and the first warning, in every API."""

import json
import math

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from torch import nn

from flwr_safedshb import (
    SMEA,
    Average,
    BatchedGrid,
    PrivacyPlan,
    PrivacyTarget,
    SafeDSHB,
    SafeDSHBClient,
    SeededRandomness,
    client_app,
    trained_arrays,
)
from flwr_safedshb.algorithm.closing import describe_closing
from flwr_safedshb.algorithm.progress import Progress, RunResult

DATA = torch.ones(20, 3), torch.ones(20, 1)


def run(
    caplog: pytest.LogCaptureFixture,
    plan: PrivacyPlan | PrivacyTarget,
    f: int = 0,
    delta: float | None = None,
) -> tuple[list[str], RunResult]:
    """Train three nodes; return what is logged as a warning or at the end."""
    model = nn.Linear(3, 1)

    def client_fn(context: Context) -> SafeDSHBClient:
        seeded, loss = SeededRandomness(0), nn.MSELoss()
        return SafeDSHBClient(
            model, loss, DATA, plan, context, randomness=seeded, delta=delta
        )

    caplog.clear()
    caplog.set_level("INFO", "flwr")
    grid = BatchedGrid(client_app(client_fn), 3)
    result = SafeDSHB(SMEA() if f else Average(), f).start(
        grid, trained_arrays(model), 3
    )
    return caplog.messages, result


def test_a_run_ends_with_three_lines(caplog: pytest.LogCaptureFixture) -> None:
    said, _ = run(caplog, PrivacyTarget(3.0, 1e-5, steps=3), 1)
    privacy, examples, trained = said[-3:]
    assert privacy.startswith("Privacy, as 3 nodes report it, for one example or")
    assert "epsilon from 2.9" in privacy
    assert examples.startswith("Examples: ")
    assert trained.startswith("Trained: 4 weights in 3 of 3 rounds, for f = 1; ")
    assert "replies excluded: none" in trained
    assert not any("NO PROTECTION" in line for line in said)


def test_without_noise_epsilon_is_said_to_be_infinite(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said, result = run(caplog, PrivacyPlan(1.0, 0.0, 20, 20))
    text = "Privacy: NONE, epsilon is infinite: 3 of 3 nodes add no noise"
    assert said[-3].startswith(text)
    assert caplog.records[-3].levelname == "WARNING"
    assert result.card is not None
    card = json.loads(json.dumps(result.card.to_dict(), allow_nan=False))
    assert card["stated_by_nodes"]["epsilon"] == "infinite"
    assert "| epsilon, of this run alone | inf" in result.card.to_markdown()


def test_an_epsilon_that_nobody_stated_is_not_passed_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said, _ = run(caplog, PrivacyPlan(1.0, 1.0, 20, 20))
    assert said[-3].startswith("Privacy: epsilon is NOT KNOWN")
    assert "give the clients a PrivacyTarget" in said[-3]
    said, _ = run(caplog, PrivacyPlan(1.0, 1.0, 20, 20), delta=1e-5)
    assert said[-3].startswith("Privacy, as 3 nodes report it")


def test_no_adversaries_are_warned_of_before_anybody_is_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said, _ = run(caplog, PrivacyTarget(3.0, 1e-5, steps=3))
    (loud,) = [line for line in said if "NO PROTECTION FROM ADVERSARIES" in line]
    assert said.index(loud) < said.index(
        next(line for line in said if line.startswith("configure_train"))
    )


def close(metrics: dict[str, object], rounds: int = 4) -> list[tuple[bool, str]]:
    arrays = ArrayRecord([np.zeros((5, 2))])
    progress = Progress.fresh(0, rounds, arrays, {"num_malicious_nodes": 2})
    progress.step = rounds
    for number in range(1, rounds + 1):
        progress.train[number] = MetricRecord(metrics)  # type: ignore[arg-type]
    return list(describe_closing(progress))


def test_nodes_that_were_excluded_or_left_out_are_named() -> None:
    often = {"left-out": [7, 9], "excluded-error": 1, "excluded-too-long": 2}
    *_, (loud, text) = close(often)
    assert not loud
    assert "replies excluded: 4 error, 8 too-long" in text
    assert "left out of most rounds: 7, 9" in text
    *_, (_, text) = close({"left-out": list(range(20, 28))})
    assert "20, 21, 22, 23, 24 and 3 more" in text


def test_skipped_rounds_make_the_line_a_warning() -> None:
    *_, (loud, text) = close({"skipped": 1})
    assert loud
    assert "in 0 of 4 rounds" in text


def test_unusable_examples_of_a_simulation_are_counted() -> None:
    _, (loud, text), _ = close({"examples-seen": 3500, "unusable-examples": 12})
    assert (loud, text[:52]) == (
        True,
        "Examples: 12 of 3,500 cannot be used and count as ze",
    )
    _, (loud, text), _ = close({})
    assert "a node tells nobody" in text


def test_one_node_without_noise_is_enough_for_no_privacy() -> None:
    stated = {
        "stated-nodes": [1, 2],
        "stated-epsilon": [1.0, math.inf],
        "stated-delta": [1e-5, 1e-5],
    }
    (loud, text), *_ = close(stated)
    assert loud
    assert "1 of 2 nodes add no noise" in text

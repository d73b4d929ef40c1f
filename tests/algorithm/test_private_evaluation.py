"""What the server makes of noisy counts: robust figures, and intervals that hold."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_safedshb.algorithm.private_evaluation import (
    EvaluationSchedule,
    aggregate_evaluation,
    describe_interval,
)
from flwr_safedshb.algorithm.wire import MOMENTUM_TAG
from flwr_safedshb.flower.compat import set_message_id
from flwr_safedshb.simulation.in_process import InProcessGrid
from flwr_safedshb.strategy import SafeDSHB
from tests.federation import layers, model
from tests.replies import record

Answer = dict[str, object]
M = 100


def honest(accuracy: float, noise: float = 0.0, std: float = 1.0) -> Answer:
    correct = M * accuracy + noise
    told = {"num-examples": M, "correct": correct, "loss": correct / 2}
    return {**told, "noise-std": std, MOMENTUM_TAG: 7}


def answers(told: Sequence[Answer]) -> tuple[list[Message], list[Message]]:
    """Return messages, and what nodes answer."""
    grid = InProcessGrid(ClientApp(), len(told))
    content = RecordDict({"arrays": model()})
    sent = [Message(content, n, "evaluate") for n in grid.get_node_ids()]
    for number, message in enumerate(sent):
        set_message_id(message, f"m{number}")
    replies = [
        Message(RecordDict({"metrics": MetricRecord(each)}), reply_to=message)  # type: ignore[arg-type]
        for message, each in zip(sent, told, strict=True)
    ]
    return sent, replies


def concluding(
    told: Sequence[Answer], f: int, per_class: bool = False
) -> dict[str, object] | None:
    sent, replies = answers(told)
    found = aggregate_evaluation(
        EvaluationSchedule(1, 2.0, per_class), sent, f, replies
    )
    return None if found is None else {**found}


def test_figures_are_medians_and_trimmed_means() -> None:
    found = concluding([honest(a / 10) for a in range(1, 8)], 2)
    assert found is not None
    assert found["median-node-accuracy"] == pytest.approx(0.4)
    assert found["trimmed-mean-node-accuracy"] == pytest.approx(0.4)
    assert found["node-accuracy-deviation"] == pytest.approx(0.1)
    assert found["median-node-loss"] == pytest.approx(2.0 * 0.2)
    assert found["replies"] == 7
    assert found["num-malicious-nodes"] == 2
    # Honest ones are five: their third is between the third and the fifth of all.
    z = 2.5758  # of 0.05 / 10
    low, high = interval(found)
    assert low == pytest.approx(0.3 - z / M, abs=1e-4)
    assert high == pytest.approx(0.5 + z / M, abs=1e-4)


def interval(found: dict[str, object]) -> tuple[float, float]:
    low, high = (found[f"median-node-accuracy-{end}"] for end in ("low", "high"))
    assert isinstance(low, float)
    assert isinstance(high, float)
    return low, high


LIES: dict[str, Callable[[np.random.Generator], Answer]] = {
    "low": lambda rng: honest(0.0),
    "high": lambda rng: honest(1.0, std=1e-300),
    "far": lambda rng: honest(1e300),
    "unsure": lambda rng: honest(0.1, std=1e300),
    "either": lambda rng: honest(float(rng.integers(2)), std=0.0),
    "near": lambda rng: honest(0.55),
    "large": lambda rng: {**honest(0.0), "num-examples": 10**9},
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize(("n", "f"), [(7, 2), (10, 3), (5, 0), (7, 3), (3, 1)])
def test_the_interval_holds_over_unequal_nodes_whatever_f_of_them_say(
    lie: str, n: int, f: int
) -> None:
    rng = np.random.default_rng([n, f, len(lie)])
    held, trials = 0, 100
    for _ in range(trials):
        sizes = rng.integers(20, 2000, size=n - f).tolist()
        true = rng.uniform(0.1, 0.95, size=n - f)
        told = []
        for size, share in zip(sizes, true, strict=True):
            std = rng.uniform(1.0, 10.0)
            noisy = size * share + rng.normal() * std
            told.append({**honest(0), "num-examples": size, "noise-std": std})
            told[-1]["correct"] = noisy
        found = concluding([*told, *(LIES[lie](rng) for _ in range(f))], f)
        assert found is not None
        low, high = interval(found)
        held += low <= float(np.median(true)) <= high
        assert low <= found["median-node-accuracy"] <= high  # type: ignore[operator]
        assert found["ends-open-to-liars"] == (f > 0 and 3 * f >= n)
    assert held >= 0.93 * trials  # below 0.93 by chance in one of 500 suites


@pytest.mark.parametrize(("n", "f"), [(7, 2), (6, 2), (7, 3)])
def test_only_a_third_of_the_nodes_can_take_an_end_away(n: int, f: int) -> None:
    told = [honest(0.5 + i / 100) for i in range(n - f)]
    ends = []
    for lie in ("low", "high", "unsure"):
        lies = [LIES[lie](np.random.default_rng(0)) for _ in range(f)]
        found = concluding([*told, *lies], f)
        assert found is not None
        ends.append((*interval(found), found["ends-open-to-liars"]))
    (low, _, opened), (_, high, _), unsure = ends
    if opened:
        assert 3 * f >= n
        assert low == 0.0
        assert high == 1.0
        assert unsure == (0.0, 1.0, 1)
    else:
        assert 3 * f < n
        assert all(low > 0.45 and high < 0.6 for low, high, _ in ends)


def test_the_pooled_accuracy_is_another_number() -> None:
    # One large node, at which the model fails: it is one of five.
    large: Answer = {**honest(0.2), "num-examples": 100 * M, "correct": 20.0 * M}
    found = concluding([honest(0.9)] * 4 + [large], 0)
    assert found is not None
    assert not any("pooled" in name for name in found)
    pooled = (4 * 0.9 + 20.0) / 104
    assert pooled < 0.25 < 0.85 < interval(found)[0]


def test_an_end_that_liars_may_have_taken_away_is_left_out() -> None:
    assert describe_interval(0.0, 0.9, open_to_liars=False) == "0.00-0.90"
    assert describe_interval(0.2, 0.9, open_to_liars=True) == "0.20-0.90"
    assert describe_interval(0.0, 0.9, open_to_liars=True) == "at most 0.90"
    assert describe_interval(0.2, 1.0, open_to_liars=True) == "at least 0.20"
    assert describe_interval(0.0, 1.0, open_to_liars=True) == "anywhere"


def test_the_log_says_where_liars_can_open_the_interval(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", logger="flwr"):
        concluding([honest(0.5)] * 3, 1)
        concluding([honest(0.5)] * 4, 1)
    third, quarter = (r.message for r in caplog.records if "median" in r.message)
    assert "each node counting once" in third
    assert "f >= n/3, so liars alone can take either end to 0 or 1" in third
    assert "n/3" not in quarter


ODD: dict[str, tuple[Answer, str]] = {
    "nan": ({**honest(0.5), "correct": math.nan}, "not-finite"),
    "infinite": ({**honest(0.5), "noise-std": math.inf}, "not-finite"),
    "no examples": ({**honest(0.5), "num-examples": 0}, "malformed"),
    "negative": ({**honest(0.5), "noise-std": -1.0}, "malformed"),
    "a list": ({**honest(0.5), "correct": [0.5]}, "malformed"),
    "unmarked": (
        {k: v for k, v in honest(0.5).items() if k != MOMENTUM_TAG},
        "wrong-keys",
    ),
    "more": ({**honest(0.5), "extra": 1.0}, "wrong-keys"),
    "nothing": ({}, "wrong-keys"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_replies_are_excluded_and_prove_an_adversary(name: str) -> None:
    odd, _ = ODD[name]
    found = concluding([honest(0.4)] * 3 + [odd], 1)
    assert found is not None
    assert (found["replies"], found["excluded"]) == (3, 1)
    assert found["num-malicious-nodes"] == 0
    assert found["median-node-accuracy"] == pytest.approx(0.4)


def test_too_few_replies_are_no_figure() -> None:
    assert concluding([honest(0.4)] * 4, 2) is None
    sent, replies = answers([honest(0.4)] * 5)
    asked = EvaluationSchedule(1)
    assert (
        aggregate_evaluation(asked, sent, 2, [*replies[:4], replies[0]]) is None
    )  # one twice
    records = RecordDict({"metrics": MetricRecord(), "more": MetricRecord()})
    strange = Message(records, reply_to=sent[4])
    found = aggregate_evaluation(asked, sent, 2, [*replies[:4], strange])
    assert found is not None
    assert found["num-malicious-nodes"] == 1


def by_class(correct: Sequence[float], count: Sequence[float], std: float) -> Answer:
    told = {"class-count": list(count), "class-correct": list(correct)}
    return {**honest(0.5, std=std), **told, "class-loss": [1.0] * len(count)}


def test_accuracies_by_class_hold_too() -> None:
    rng = np.random.default_rng(4)
    held = []
    for _ in range(60):
        told = []
        for _ in range(5):
            count = np.array([50, 30, 20]) + 3.0 * rng.normal(size=3)
            half = count - [50, 30, 20]
            correct = np.array([40, 15, 5]) + 3.0 * rng.normal(size=3) + half / 2
            told.append(by_class(correct.tolist(), count.tolist(), 3.0))
        told += [
            by_class([0.0] * 3, [9.0] * 3, 0.0),
            by_class([9.0, 9.0], [9.0, 9.0], 1.0),
        ]
        found = concluding(told, 2, per_class=True)
        assert found is not None
        low, high = (
            found["median-node-class-accuracy-low"],
            found["median-node-class-accuracy-high"],
        )
        for k, true in enumerate((0.8, 0.5, 0.25)):
            held.append(low[k] <= true <= high[k])  # type: ignore[index]
    assert np.mean(held) >= 0.95


def test_nodes_are_asked_every_so_often_and_at_the_end() -> None:
    asked: list[int] = []
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(record(list(layers(0, 0))), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        config = message.content.config_records["config"]
        asked.append(int(config["private-evaluation"]))  # type: ignore[arg-type]
        told = MetricRecord(honest(0.5))  # type: ignore[arg-type]
        return Message(RecordDict({"metrics": told}), reply_to=message)

    strategy = SafeDSHB(evaluate_every=2, evaluate_max_loss=3.0)
    result = strategy.start(InProcessGrid(app, 3), model(), 5)
    assert asked == [2] * 3 + [4] * 3 + [5] * 3
    metrics = result.evaluate_metrics_clientapp
    assert [*metrics] == [2, 4, 5]
    assert metrics[5]["median-node-accuracy"] == 0.5
    assert metrics[5]["median-node-loss"] == 3.0 * 0.25


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"evaluate_every": 0}, "evaluate_every=0"),
        ({"evaluate_every": -3}, "evaluate_every=-3"),
        ({"evaluate_every": 1.5}, "evaluate_every=1.5"),
        ({"evaluate_every": True}, "evaluate_every=True"),
        ({"evaluate_every": 1, "evaluate_max_loss": 0.0}, "evaluate_max_loss=0"),
        ({"evaluate_every": 1, "evaluate_max_loss": math.nan}, "evaluate_max_loss=nan"),
        ({"evaluate_every": 1, "fraction_evaluate": 0.5}, "two ways to evaluate"),
    ],
)
def test_odd_settings_are_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SafeDSHB(**arguments)  # type: ignore[arg-type]

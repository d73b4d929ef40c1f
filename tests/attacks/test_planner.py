"""The plan of pushes, against the loss at the end, differentiated by brute force."""

import numpy as np
import pytest

from flwr_safedshb.attacks.planner import PushPlanner
from tests.oracles import Floats

D, ROUNDS = 3, 7
ROOT = np.random.default_rng(0).normal(size=(D, D))
HESSIAN = ROOT @ ROOT.T / D + np.eye(D)
OPTIMUM = np.array([1.0, -2.0, 0.5])


def gradient(model: Floats) -> Floats:
    return np.asarray(HESSIAN @ (model - OPTIMUM))


def rates(number: int) -> tuple[float, float]:
    """Both change in every round, so that a shift by one is seen."""
    return 0.3 + 0.05 * number, 0.8 - 0.1 * (number % 3)


def train(pushes: Floats, model: Floats, momentum: Floats, first: int) -> list[Floats]:
    """Algorithm 1 with honest clients who agree, and a push in every round."""
    models = []
    for number in range(first, ROUNDS):
        gamma, beta = rates(number)
        momentum = beta * momentum + (1 - beta) * gradient(model)
        model = model - gamma * (momentum + pushes[number])
        models.append(model)
    return models


def loss(models: list[Floats], output: str) -> float:
    returned = models[-1]
    if output == "average":
        returned = np.mean(models[ROUNDS // 2 - ROUNDS :], axis=0)
    return float((returned - OPTIMUM) @ HESSIAN @ (returned - OPTIMUM) / 2)


def steepest(pushes: Floats, output: str, number: int) -> Floats:
    """Minus the unit vector along which a round's push raises the loss most."""
    slopes = np.empty(D)
    for i in range(D):
        both = []
        for sign in (1e-4, -1e-4):
            moved = pushes.copy()
            moved[number, i] += sign
            both.append(loss(train(moved, np.zeros(D), np.zeros(D), 0), output))
        slopes[i] = (both[0] - both[1]) / 2e-4
    return np.asarray(-slopes / np.linalg.norm(slopes))


@pytest.mark.parametrize("output", ["last", "average"])
def test_each_plan_is_the_steepest_way_under_the_plan_before(output: str) -> None:
    planner = PushPlanner(gradient, gradient, rates, ROUNDS, output)  # type: ignore[arg-type]
    pushes = np.zeros((ROUNDS, D))
    model, models = np.zeros(D), list[Floats]()
    for number in range(ROUNDS):
        found = planner([model[:1], model[1:].reshape(2, 1)])
        assert np.linalg.norm(found) == pytest.approx(1.0)
        expected = steepest(pushes, output, number)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        # Of the plan, 0.4 came through in this round; so much is expected of the next.
        every = [steepest(pushes, output, later) for later in range(number, ROUNDS)]
        pushes[number:] = -0.4 * np.array(every)
        models = train(pushes, np.zeros(D), np.zeros(D), 0)
        model = models[number]


def test_between_two_plans_the_last_one_is_kept() -> None:
    asked = list[Floats]()

    def counted(model: Floats) -> Floats:
        asked.append(model)
        return gradient(model)

    calls = []
    planner = PushPlanner(counted, gradient, rates, ROUNDS, horizon=2, num_plans=4)
    for _ in range(ROUNDS):
        asked.clear()
        planner([np.zeros(D)])
        calls.append(len(asked))
    # One for the momentum; two rounds ahead, and one difference on the way back.
    assert calls == [4, 1, 4, 1, 4, 1, 2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_rounds": 0}, "num_rounds=0 must be at least 1"),
        ({"horizon": 0}, "horizon=0"),
        ({"num_plans": 0}, "num_plans=0"),
        ({"output": "best"}, "last or average"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PushPlanner(gradient, gradient, rates, **{"num_rounds": 3, **options})  # type: ignore[arg-type]

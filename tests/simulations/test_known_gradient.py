"""What adversaries know of the loss and its optimum, from examples of their own."""

import numpy as np
import pytest

from flwr_safedshb.algorithm.model_arrays import trained_parameters
from flwr_safedshb.attacks import PushPlanner
from flwr_safedshb.simulation.in_process import InProcessGrid
from simulations import adversaries, app
from simulations.adversaries import find_goal, make_gradient, make_planner
from simulations.attacks import Lookahead
from simulations.config import compose_config
from simulations.experiment import build_untrained, load_federation, make_strategy
from simulations.models import loss_gradient

SETTINGS = "data=digits model=mlp num_nodes=5 num_malicious_nodes=2 attack=strongest"


def test_adversaries_with_many_examples_use_some_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = load_federation(SETTINGS).shards[:2]
    model = build_untrained(SETTINGS)
    sent = [weight.detach().numpy() for weight in trained_parameters(model).values()]
    whole = make_gradient(SETTINGS)(sent)
    everything = loss_gradient(model, held, compose_config(SETTINGS).weight_decay)
    np.testing.assert_allclose(whole, everything, rtol=1e-5, atol=1e-7)
    count = sum(len(labels) for _, labels in held)
    monkeypatch.setattr(adversaries, "_KNOWN_EXAMPLES", count // 2)
    some = make_gradient(SETTINGS)(sent)
    cosine = whole @ some / np.linalg.norm(whole) / np.linalg.norm(some)
    assert 0.9 < cosine < 1.0 - 1e-6


def test_the_goal_leads_away_from_the_optimum_of_what_adversaries_hold() -> None:
    settings = "data=breast-cancer num_nodes=5 num_malicious_nodes=2 attack=target"
    goal = find_goal(settings)
    model = build_untrained(settings)
    first = [weight.detach().numpy() for weight in trained_parameters(model).values()]
    assert not any(weight.any() for weight in first)
    parts, start = [], 0
    for weight in first:
        parts.append(-goal[start : start + weight.size].reshape(weight.shape))
        start += weight.size
    gradient = make_gradient(settings)
    left = np.linalg.norm(gradient([part.astype(np.float32) for part in parts]))
    assert left < 0.01 * np.linalg.norm(gradient(first))


def test_the_planner_knows_what_honest_clients_clip_and_what_the_server_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = list[dict[str, object]]()

    def spy(*args: object, **_: object) -> object:
        names = ("clients", "loss", "rates", "rounds", "output", "horizon", "plans")
        made.append(dict(zip(names, args, strict=True)))
        return PushPlanner(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(adversaries, "PushPlanner", spy)
    settings = (
        "data=breast-cancer num_nodes=5 num_malicious_nodes=2 attack=lookahead steps=6 "
        "local_steps=2 momentum=0.5 server_learning_rate=3 weight_decay=0.1 "
        "output=average privacy.plan.clip_norm=0.01"
    )
    plan = make_planner(settings, make_strategy(settings), Lookahead(horizon=9))
    (known,) = made
    assert [known[k] for k in ("rounds", "output", "horizon")] == [3, "average", 9]
    assert known["rates"](1) == (6.0, 0.25)  # type: ignore[operator]
    weights = np.random.default_rng(0).normal(size=31)
    # Every example is clipped, so that only the penalty can be longer.
    penalty = 0.1 * weights
    clipped = known["clients"](weights) - penalty  # type: ignore[operator]
    assert 0.0 < np.linalg.norm(clipped) <= 0.01
    whole = known["loss"](weights) - penalty  # type: ignore[operator]
    assert np.linalg.norm(whole) > 0.05
    sent = np.split(np.zeros(31, np.float32), [30])
    assert np.linalg.norm(plan([*sent])) == pytest.approx(1.0)


@pytest.mark.federation
def test_the_worst_attack_is_that_of_a_rehearsal_with_another_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = "data=breast-cancer aggregation=average steps=4 momentum=0 "
    common += "server_learning_rate=3 seed=5"
    named = "attack=worst attack.attacks=[mimic,sign-flip]"
    seeds = list[tuple[str, int]]()

    def spy(overrides: str) -> object:
        cfg = compose_config(overrides)
        seeds.append((cfg.attack._target_.rpartition(".")[2], cfg.seed))
        return make_strategy(overrides)

    monkeypatch.setattr(app, "make_strategy", spy)
    models = []
    for text in (f"{common} {named}", f"{common} attack=sign-flip"):
        grid = InProcessGrid(app.make_client_app(text), 7, seed=5)
        models.append(app.train(text, grid).arrays.to_numpy_ndarrays())
    for chosen, plain in zip(*models, strict=True):
        np.testing.assert_array_equal(chosen, plain)
    assert seeds == [("Worst", 5), ("Mimic", 1005), ("SignFlip", 1005), ("SignFlip", 5)]
    assert "attack=worst is sign-flip" in capsys.readouterr().out

"""Whether a training has a chance against its noise."""

import math

import numpy as np
import pytest

from flwr_safedshb.theory.trainability import (
    MAX_GROWTH,
    SAFE_GROWTH,
    SAFE_LOAD,
    NoiseLoad,
    find_rate,
    growth,
    walk_length,
)

# 26,090 weights, 205 examples, 60 steps, 7 nodes, a full batch, delta 1e-5: at epsilon
# 3 it learnt, at 0.3 nothing (the study on trainability).
LEARNT, LOST = (NoiseLoad(26_090, 60, 1.0, s, 7) for s in (0.1055, 0.852))


def test_the_verdict_is_that_of_measured_trainings() -> None:
    assert LEARNT.verdict == "may not train"
    assert LOST.verdict == "will not train"
    assert NoiseLoad(69, 400, 1.0, 0.08, 7, 3).verdict == "can train"
    # The norm of the noise alone decides nothing: here it is 17 times the gradient's.
    assert LEARNT.norm_ratio == pytest.approx(17.0, rel=0.01)


def test_the_load_does_not_depend_on_the_unit_of_gradients() -> None:
    twice = NoiseLoad(26_090, 60, 2.0, 2 * 0.852, 7)
    assert twice.load == pytest.approx(LOST.load, rel=1e-12)


@pytest.mark.parametrize("load", [1.0, SAFE_LOAD])
def test_the_cures_reach_the_load_they_are_for_and_no_less_does(load: float) -> None:
    weights, nodes = LOST.find_weights(load), LOST.find_nodes(load)
    assert NoiseLoad(weights, 60, 1.0, 0.852, 7).load <= load
    assert NoiseLoad(weights + 1, 60, 1.0, 0.852, 7).load > load
    assert NoiseLoad(26_090, 60, 1.0, 0.852, nodes).load <= load
    assert NoiseLoad(26_090, 60, 1.0, 0.852, nodes - 1).load > load


def test_adversaries_add_no_signal() -> None:
    attacked = NoiseLoad(26_090, 60, 1.0, 0.852, 9, 2)
    assert attacked.load == LOST.load
    assert attacked.find_nodes() == LOST.find_nodes() + 2


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.99])
def test_noise_moves_the_model_as_far_as_a_simulated_walk(momentum: float) -> None:
    d, honest, steps, rate, std = 4000, 5, 40, 0.3, 0.7
    rng = np.random.default_rng(0)
    model, state = np.zeros(d), np.zeros((honest, d))
    for _ in range(steps):
        state = momentum * state + (1 - momentum) * std * rng.normal(size=(honest, d))
        model -= rate * state.mean(axis=0)
    walked = walk_length(std, d, honest, steps, rate, momentum)
    assert np.linalg.norm(model) == pytest.approx(walked, rel=0.05)


def test_noise_grows_the_outputs_of_layers_by_as_much_as_is_said() -> None:
    rng = np.random.default_rng(0)
    shapes, walk = [(200, 300), (300, 300), (300, 100)], 0.2
    weights = [rng.normal(size=shape) / math.sqrt(shape[0]) for shape in shapes]
    moved = [w + walk * rng.normal(size=w.shape) for w in weights]
    before = after = rng.normal(size=(50, 200))
    for w, v in zip(weights, moved, strict=True):
        before, after = before @ w, after @ v
    found = growth([(w.size, float(np.linalg.norm(w))) for w in weights], walk)
    assert np.linalg.norm(after) / np.linalg.norm(before) == pytest.approx(found, 0.05)


def test_the_rate_that_is_named_is_the_largest_harmless_one() -> None:
    layers, walk = [(400, 6.0), (200, 4.0)], 3.0
    assert growth(layers, walk) > MAX_GROWTH / 4
    share = find_rate(layers, walk, 2.0) / 2.0
    assert growth(layers, share * walk) == pytest.approx(SAFE_GROWTH, rel=1e-6)
    assert find_rate(layers, 1e-3, 2.0) == 2.0


def test_a_layer_that_starts_at_zero_has_nothing_to_grow() -> None:
    assert growth([(31, 0.0)], 1e9) == 1.0
    assert growth([(31, 1e-30)], 1e300) > MAX_GROWTH


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"d": 0}, "d=0"),
        ({"steps": 0}, "steps=0"),
        ({"clip_norm": math.nan}, "clip_norm=nan"),
        ({"noise_std": math.inf}, "noise_std=inf"),
        ({"f": 4}, "f=4"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    changed: dict[str, float], text: str
) -> None:
    settings = {"d": 9, "steps": 9, "clip_norm": 1.0, "noise_std": 1.0, "n": 7}
    with pytest.raises(ValueError, match=text):
        NoiseLoad(**{**settings, **changed})  # type: ignore[arg-type]

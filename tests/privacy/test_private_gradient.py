import io
import logging
import math
import traceback
import warnings

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from flwr_safedshb.privacy.batches import Example
from flwr_safedshb.privacy.clipping.gradients import (
    ClippedGradients,
    UnsupportedModelError,
)
from flwr_safedshb.privacy.plan import Clipping, PrivacyPlan, Sampling
from flwr_safedshb.privacy.private_gradient import Layers, private_gradient
from flwr_safedshb.privacy.randomness.noise import (
    Randomness,
    SecureRandomness,
    SeededRandomness,
)
from tests.clipping import cross_entropy
from tests.clipping import literal as literal_sum

# Threads cost more than they bring on matrices of this size.
torch.set_num_threads(1)
both_paths = pytest.mark.parametrize("clipping", ["per-example", "ghost"])
both_samplers = pytest.mark.parametrize("sampling", ["fixed", "poisson"])

EXAMPLES = 40
LOSS = nn.CrossEntropyLoss()


class Items(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A dataset that can only be read one example at a time."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


def data(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(EXAMPLES, 6, generator=generator)
    return inputs, torch.randint(3, (EXAMPLES,), generator=generator)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 3)


def plan(
    noise_multiplier: float = 1.0,
    sampling: Sampling = "fixed",
    clipping: Clipping = "per-example",
    batch_size: int = 5,
    num_examples: int = EXAMPLES,
    clip_norm: float = 0.5,
) -> PrivacyPlan:
    return PrivacyPlan(
        clip_norm,
        noise_multiplier,
        batch_size,
        num_examples,
        sampling=sampling,
        clipping=clipping,
    )


def flat(layers: Layers) -> npt.NDArray[np.float64]:
    return np.concatenate([layer.ravel() for layer in layers]).astype(np.float64)


def literal(
    net: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, p: PrivacyPlan
) -> npt.NDArray[np.float64]:
    """(1/b) sum g min(1, C/||g||), one example at a time."""
    total = literal_sum(net, cross_entropy, inputs, targets, p.clip_norm)
    return torch.cat([part.flatten() for part in total]).numpy() / p.batch_size


@both_paths
@both_samplers
def test_is_the_literal_mean_plus_the_noise_of_the_source(
    sampling: Sampling, clipping: Clipping
) -> None:
    net, (inputs, targets) = model(), data()
    for seed in range(5):
        p = plan(sampling=sampling, clipping=clipping)
        source = SeededRandomness(seed)
        batch = p.sampler.draw(p, source)
        noise = source.gaussian(sum(w.numel() for w in net.parameters()), p.noise_std)
        expected = literal(net, inputs[batch], targets[batch], p) + noise
        released = private_gradient(
            (net, LOSS), (inputs, targets), p, SeededRandomness(seed)
        )
        assert [r.shape for r in released] == [(3, 6), (3,)]
        assert all(r.dtype == np.float32 for r in released)
        np.testing.assert_allclose(flat(released), expected, atol=1e-6)


def p_value(draws: npt.NDArray[np.float64], std: float) -> float:
    return float(stats.kstest(draws, "norm", args=(0.0, std)).pvalue)


def test_what_a_private_source_releases_is_on_a_grid_of_the_plan_alone() -> None:
    net, examples, p = model(), data(), plan()
    grid = 2.0 ** np.floor(np.log2(p.noise_std)) / 2**24

    def off_grid(source: Randomness) -> int:
        released = flat(private_gradient((net, LOSS), examples, p, source))
        return int(np.count_nonzero(released.astype(np.float64) % grid))

    assert not any(off_grid(SecureRandomness()) for _ in range(50))
    # What the rounding is for: float32 alone keeps finer values near zero.
    assert any(off_grid(SeededRandomness(seed)) for seed in range(50))


@pytest.mark.parametrize("case", ["zero gradients", "empty batches"])
def test_noise_has_the_deviation_of_the_plan(case: str) -> None:
    wide = nn.Linear(60_000, 1, bias=False)
    inputs, targets = torch.zeros(200, 60_000), torch.zeros(200, 1)
    if case == "empty batches":
        inputs = inputs + 1.0
    p = PrivacyPlan(
        2.0, 1.5, 1, 200, sampling="fixed" if case == "zero gradients" else "poisson"
    )
    seed = 0
    while case == "empty batches" and len(p.sampler.draw(p, SeededRandomness(seed))):
        seed += 1
    released = private_gradient(
        (wide, nn.MSELoss()), (inputs, targets), p, SeededRandomness(seed)
    )
    draws = flat(released)
    assert p.noise_std == 2 * 2.0 * 1.5 / 1  # 2 C s / b
    assert p_value(draws, p.noise_std) > 0.01
    assert p_value(0.9 * draws, p.noise_std) < 1e-6
    assert p_value(1.1 * draws, p.noise_std) < 1e-6


@both_paths
@both_samplers
def test_one_example_moves_the_result_by_at_most_its_sensitivity(
    sampling: Sampling, clipping: Clipping
) -> None:
    net, (inputs, targets) = model(), data()
    p = plan(sampling=sampling, clipping=clipping)
    gradients = ClippedGradients(net, LOSS, p.clip_norm, clipping)
    other = inputs.clone()
    moved = []
    for scale in (100.0, -100.0, 1e-3, math.nan, math.inf):
        other[3] = scale * inputs[7]
        for seed in range(15):
            ours, theirs = (
                flat(
                    private_gradient(gradients, (x, targets), p, SeededRandomness(seed))
                )
                for x in (inputs, other)
            )
            moved.append(float(np.linalg.norm(ours - theirs)))
    bound = 2 * p.clip_norm / p.batch_size
    assert max(moved) <= bound * (1 + 1e-5)
    assert max(moved) > 0.5 * bound  # the bound is not met because nothing happens


def test_divisor_is_the_plans_batch_size_whatever_was_drawn() -> None:
    net = nn.Linear(1, 1, bias=False)
    inputs, targets = torch.ones(8, 1), torch.zeros(8)
    loss = lambda outputs, targets: outputs[:, 0]  # noqa: E731  # gradient 1 each
    p = PrivacyPlan(1.0, 0.0, 4, 8, sampling="poisson")
    seen = set()
    for seed in range(40):
        size = len(p.sampler.draw(p, SeededRandomness(seed)))
        released = private_gradient(
            (net, loss), (inputs, targets), p, SeededRandomness(seed)
        )
        assert float(released[0][0, 0]) == pytest.approx(size / 4)
        seen.add(size)
    assert len(seen) > 3


def test_weight_decay_is_added_after_the_noise() -> None:
    net = model()
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(1e3)  # decay before the clip would be clipped away
    p = plan()
    plain, decayed = (
        flat(private_gradient((net, LOSS), data(), p, SeededRandomness(1), decay))
        for decay in (0.0, 0.1)
    )
    weights = torch.cat([w.detach().flatten() for w in net.parameters()])
    np.testing.assert_allclose(decayed - plain, 0.1 * weights.numpy(), rtol=1e-4)


@both_samplers
def test_all_kinds_of_datasets_give_the_same_bytes(sampling: Sampling) -> None:
    inputs, targets = data()
    kinds: list[object] = [
        (inputs, targets),
        TensorDataset(inputs, targets),
        Items(inputs, targets),
    ]
    p = plan(sampling=sampling, batch_size=1, noise_multiplier=0.1)
    for seed in range(6):  # with empty batches among them
        released = {
            flat(
                private_gradient((model(), LOSS), kind, p, SeededRandomness(seed))
            ).tobytes()
            for kind in kinds
        }
        assert len(released) == 1


def test_secure_source_gives_a_different_gradient_each_time() -> None:
    p, source = plan(), SecureRandomness()
    gradients = ClippedGradients(model(), LOSS, p.clip_norm)
    released = {
        flat(private_gradient(gradients, data(), p, source)).tobytes() for _ in range(3)
    }
    assert len(released) == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_examples": EXAMPLES + 1}, "num_examples=41"),
        ({"clip_norm": 0.6}, "clip_norm=0.6"),
    ],
)
def test_plan_for_other_data_or_another_clip_is_refused(
    changes: dict[str, float], words: str
) -> None:
    gradients = ClippedGradients(model(), LOSS, 0.5)
    with pytest.raises(ValueError, match=words):
        private_gradient(gradients, data(), plan(**changes), SeededRandomness(0))  # type: ignore[arg-type]


@pytest.mark.parametrize("weight_decay", [-0.1, math.nan, math.inf])
def test_bad_weight_decay(weight_decay: float) -> None:
    with pytest.raises(ValueError, match="weight_decay"):
        private_gradient(
            (model(), LOSS), data(), plan(), SeededRandomness(0), weight_decay
        )


def test_targets_of_another_length_are_refused() -> None:
    inputs, targets = data()
    with pytest.raises(ValueError, match="as many rows; they have 39, 40"):
        private_gradient(
            (model(), LOSS), (inputs, targets[:-1]), plan(), SeededRandomness(0)
        )


def transcript(
    dataset: object, clipping: Clipping, capfd: pytest.CaptureFixture[str]
) -> str:
    """Everything a step says besides its result: logs, prints, warnings, errors."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    said = ""
    p = plan(clipping=clipping, batch_size=EXAMPLES)  # every example, every time
    net = model()
    try:
        with warnings.catch_warnings(record=True, action="always") as caught:
            for seed in range(3):
                try:
                    private_gradient((net, LOSS), dataset, p, SeededRandomness(seed))
                except Exception as error:
                    said += "".join(traceback.format_exception(error, chain=False))
                    said += f"{error.__cause__!r} {error.__context__!r}"
        said += " ".join(str(warning.message) for warning in caught)
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    captured = capfd.readouterr()
    return said + stream.getvalue() + captured.out + captured.err


def adjacent(case: str, kind: str) -> object:
    """A dataset that differs from the others in example 3 only."""
    inputs, targets = data()
    match case:
        case "large":
            inputs[3] *= 1e3
        case "nan":
            inputs[3, 2] = math.nan
        case "inf":
            inputs[3, 2] = math.inf
        case "label 77":
            targets[3] = 77
        case "label 88":
            targets[3] = 88
    return Items(inputs, targets) if kind == "items" else (inputs, targets)


@both_paths
@pytest.mark.parametrize("kind", ["items", "tensors"])
def test_nothing_said_depends_on_values_and_no_error_on_the_data(
    clipping: Clipping, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    said = {
        case: transcript(adjacent(case, kind), clipping, capfd)
        for case in ("as it is", "large", "nan", "inf", "label 77", "label 88")
    }
    assert said["as it is"] == said["large"] == ""
    # The log of the node says that an example was left out, and never which value.
    for one, other in (("label 77", "label 88"), ("nan", "inf")):
        assert said[one] == said[other]
        assert "1 examples cannot be used" in said[one]
        assert "Traceback" not in said[one]


LIKE = torch.zeros(6), torch.tensor(0)


class Unreadable(Items):
    """Some examples cannot be read, or have another shape than the others."""

    def __init__(self, bad: dict[int, str]) -> None:
        super().__init__(*data())
        self.bad = bad

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        match self.bad.get(index):
            case "raises":
                raise OSError("no such file")
            case "shape":
                return torch.zeros(7), self.targets[index]
            case "type":
                return self.inputs[index].double(), self.targets[index]
            case "label":
                return self.inputs[index], torch.tensor(77)
        return super().__getitem__(index)


@both_paths
@pytest.mark.parametrize("how", ["raises", "shape", "type", "label"])
@pytest.mark.parametrize("where", [0, 1, 17])
def test_example_that_cannot_be_used_counts_as_zero_and_no_other_does(
    how: str, where: int, clipping: Clipping
) -> None:
    p = plan(0.0, clipping=clipping, batch_size=EXAMPLES)
    net, (inputs, targets) = model(), data()
    keep = [i for i in range(EXAMPLES) if i != where]
    expected = literal(net, inputs[keep], targets[keep], p)
    found = private_gradient(
        (net, LOSS), Unreadable({where: how}), p, SeededRandomness(0), like=LIKE
    )
    np.testing.assert_allclose(flat(found), expected, atol=1e-6)


def test_whatever_the_examples_are_there_is_an_answer() -> None:
    bad = dict.fromkeys(range(1, EXAMPLES), "raises")
    p = plan(batch_size=3)
    for seed in range(8):
        found = private_gradient(
            (model(), LOSS), Unreadable(bad), p, SeededRandomness(seed)
        )
        assert np.isfinite(flat(found)).all()


class Named(Dataset[tuple[dict[str, object], torch.Tensor]]):
    """Examples with a number beside their values, one of them built otherwise."""

    def __init__(self, odd: dict[str, object]) -> None:
        self.odd = odd

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[dict[str, object], torch.Tensor]:
        inputs, targets = data()
        usual = {"x": inputs[index], "name": index}
        return self.odd if index == 7 else usual, targets[index]


class Keyed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(batch["x"])
        return outputs


@pytest.mark.parametrize(
    "odd",
    [
        {"x": torch.ones(6), "other": 7},
        {"x": torch.ones(6)},
        {"x": torch.ones(6), "name": torch.ones(6)},
        {"x": torch.ones(6), "name": "7"},
        {"x": "seven", "name": 7},
        {},
    ],
)
def test_an_example_that_is_built_otherwise_counts_as_zero(
    odd: dict[str, object],
) -> None:
    p = plan(0.0, batch_size=EXAMPLES)
    net, (inputs, targets) = Keyed(), data()
    keep = [i for i in range(EXAMPLES) if i != 7]
    expected = literal(net.inner, inputs[keep], targets[keep], p)
    found = private_gradient((net, LOSS), Named(odd), p, SeededRandomness(0))
    np.testing.assert_allclose(flat(found), expected, atol=1e-6)


def test_refusals_are_about_the_model_and_not_the_examples() -> None:
    with pytest.raises(UnsupportedModelError, match="one value per example"):
        private_gradient(
            (model(), nn.functional.cross_entropy), data(), plan(), SeededRandomness(0)
        )
    with pytest.raises(UnsupportedModelError, match="made-up"):
        private_gradient((nn.Linear(5, 3), LOSS), data(), plan(), SeededRandomness(0))
    gradients = ClippedGradients(nn.Linear(5, 3), LOSS, 0.5)
    with pytest.raises(UnsupportedModelError, match="made-up"):
        gradients.prepare(*data())


# Whether an example is drawn changes nothing but its own place in the batch.

ONES, ZEROS = torch.ones(40, 1), torch.zeros(40)


def slope(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs[:, 0]  # whose gradient is 1 for every example


@pytest.mark.parametrize(
    ("dataset", "like"),
    [
        ((ONES, ZEROS), None),
        (list(zip(ONES, ZEROS, strict=True)), (torch.zeros(1), torch.zeros(()))),
    ],
    ids=["whole", "one by one"],
)
def test_a_poisson_batch_has_as_many_places_for_any_draw(
    dataset: object,
    like: tuple[object, object] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = PrivacyPlan(1.0, 0.0, 1, 40, sampling="poisson")
    seen: list[torch.Tensor] = []
    own = ClippedGradients.consume_batch

    def watched(
        self: ClippedGradients, batch: Example, groups: int = 1, *, usable: torch.Tensor
    ) -> torch.Tensor:
        seen.append(usable)
        return own(self, batch, groups, usable)

    monkeypatch.setattr(ClippedGradients, "consume_batch", watched)
    gradients = ClippedGradients(nn.Linear(1, 1, bias=False), slope, 1.0)
    source = SecureRandomness()
    released = [
        float(private_gradient(gradients, dataset, plan, source, like=like)[0][0, 0])
        for _ in range(200)
    ]
    places = plan.sampler.padded_size(plan)
    assert {len(usable) for usable in seen} == {places}
    drawn = [int(usable.sum()) for usable in seen]
    # Every example that was drawn counts, and batches without one are answered too.
    assert sorted(round(r) for r in released if r > 0.5) == sorted(drawn)
    assert len(set(drawn)) > 2
    taken = torch.stack(seen).sum(dim=0).numpy()
    assert stats.chisquare(taken).pvalue > 1e-4


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
@pytest.mark.parametrize(("batch", "examples"), [(1, 1), (5, 40), (25, 2763), (9, 9)])
def test_there_are_places_enough(sampling: str, batch: int, examples: int) -> None:
    plan = PrivacyPlan(1.0, 1.0, batch, examples, sampling=sampling)
    places = plan.sampler.padded_size(plan)
    assert batch <= places <= examples
    if sampling == "poisson":
        rare = stats.binom.sf(places, examples, batch / examples)
        assert rare < 2.0**-90
    for seed in range(50):
        drawn = plan.sampler.draw(plan, SeededRandomness(seed))
        assert len(np.unique(drawn)) == len(drawn) <= places

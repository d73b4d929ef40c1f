"""Persons as the unit: whose examples are drawn, and what a person can change."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from flwr_safedshb.privacy.batches import DatasetError, Example
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.evaluation import Question, private_counts
from flwr_safedshb.privacy.owners import OwnedExamples, make_owned_examples
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.private_gradient import (
    BatchSource,
    draw_batch,
    private_gradient,
    private_vector,
)
from flwr_safedshb.privacy.randomness.noise import (
    Randomness,
    SecureRandomness,
    SeededRandomness,
)
from flwr_safedshb.privacy.samplers.standard import Fixed
from flwr_safedshb.simulation.batched import private_vectors
from tests.clipping import cross_entropy

torch.set_num_threads(1)

K = 3
# Five persons with 1, 2, 3, 4 and 7 examples, whose rows are mixed.
NAMES = [*"abcdebcdecdedeeee"]


def number_rows(
    names: Sequence[object], per_owner: int = K, count: int | None = None
) -> OwnedExamples:
    """Return examples whose input is their row."""
    rows = torch.arange(len(NAMES), dtype=torch.float32)[: count or None]
    return make_owned_examples((rows[:, None], rows), names, per_owner)


def read(
    data: OwnedExamples, owner: int, randomness: Randomness
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    inputs, _, usable = data.read_batch(np.array([owner]), None, randomness)
    assert isinstance(inputs, torch.Tensor)
    assert usable is not None
    return inputs[:, 0].long().numpy(), usable.numpy()


@pytest.mark.parametrize("randomness", [SecureRandomness(), SeededRandomness(0)])
def test_places_hold_distinct_examples_of_the_person_alone(
    randomness: Randomness,
) -> None:
    data = number_rows(NAMES)
    for owner, name in enumerate("abcde"):
        own = {row for row, each in enumerate(NAMES) if each == name}
        for _ in range(50):
            rows, usable = read(data, owner, randomness)
            assert set(rows) <= own
            assert usable.sum() == len(set(rows[usable])) == min(K, len(own))


@pytest.mark.parametrize(("count", "per_owner"), [(7, 3), (4, 3), (11, 5), (6, 5)])
def test_every_example_is_as_likely_as_any_other(count: int, per_owner: int) -> None:
    data, randomness = number_rows(["a"] * count, per_owner, count), SeededRandomness(1)
    drawn = Counter[int]()
    for _ in range(4000):
        drawn.update(read(data, 0, randomness)[0].tolist())
    expected = 4000 * per_owner / count
    assert all(
        abs(drawn[row] - expected) < 5 * math.sqrt(expected) for row in range(count)
    )


def test_owners_are_columns_items_or_tensors() -> None:
    class Column:
        def to_numpy(self) -> NDArray[np.object_]:
            return np.array(NAMES, object)

    for owners in (NAMES, np.array(NAMES), Column(), torch.tensor([*map(ord, NAMES)])):
        assert number_rows(owners).size == 5  # type: ignore[arg-type]
    items = [{"who": name, "x": [1.0, 2.0], "y": 0} for name in NAMES]
    like = torch.zeros(2), 0
    data = make_owned_examples(items, "who", K, "y", None, like)
    assert data.size == 5
    inputs, _, _ = data.read_batch(np.array([0]), None, SeededRandomness(0))
    assert isinstance(inputs, torch.Tensor)
    assert inputs.shape == (K, 2)


def test_an_example_without_an_owner_is_never_drawn() -> None:
    names = ["a", None, "b", math.nan, "a"]
    data = number_rows(names, count=5)
    assert data.size == 2
    drawn = {
        int(row)
        for owner in (0, 1)
        for row in read(data, owner, SeededRandomness(0))[0]
    }
    assert drawn == {0, 2, 4}


@pytest.mark.parametrize(
    ("owners", "match"),
    [
        (np.zeros((17, 2)), "one owner"),
        ([("a", "b")] * 17, "one owner"),
        (NAMES[:-1], "16 entries for 17 examples"),
        ([None] * 17, "no example has an owner"),
    ],
)
def test_owners_that_are_none_are_refused(owners: object, match: str) -> None:
    rows = torch.arange(17.0)
    with pytest.raises(DatasetError, match=match):
        make_owned_examples((rows[:, None], rows), owners, K)  # type: ignore[arg-type]


def test_a_key_that_items_do_not_have_is_refused() -> None:
    items = [{"x": [1.0], "y": 0}]
    with pytest.raises(DatasetError, match="owners='who'"):
        make_owned_examples(items, "who", K, "y", None, (torch.zeros(1), 0))


def test_an_unusable_example_is_an_empty_place_and_its_person_stays() -> None:
    inputs = torch.arange(6.0)[:, None]
    inputs[1] = inputs[4] = inputs[5] = math.nan
    data = make_owned_examples((inputs, torch.arange(6.0)), [*"aaabcc"], K)
    assert data.size == 3
    rows, usable = read(data, 0, SeededRandomness(0))
    assert set(rows[usable]) == {0, 2}
    assert set(rows) == {0, 2}
    assert not read(data, 2, SeededRandomness(0))[1].any()


def test_a_person_with_many_examples_changes_no_shape_and_no_number_of_reads() -> None:
    class Items(list[dict[str, object]]):
        reads = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            self.reads += 1
            return super().__getitem__(index)

    seen = set()
    for many in (1, 2, 1000):
        names = ["a"] * many + ["b", "c", "d"]
        items = Items({"who": name, "x": [1.0], "y": 0} for name in names)
        data = make_owned_examples(items, "who", 5, "y", None, (torch.zeros(1), 0))
        items.reads = 0
        inputs, _, _ = data.read_batch(np.array([0, 2]), None, SecureRandomness())
        assert isinstance(inputs, torch.Tensor)
        seen.add((data.size, tuple(inputs.shape), items.reads))
    assert seen == {(4, (10, 1), 10)}


def make_data(
    seed: int, first: int
) -> tuple[OwnedExamples, tuple[torch.Tensor, torch.Tensor, NDArray[np.int64]]]:
    """Return ten persons, the first of whom has `first` examples of their own."""
    rng = np.random.default_rng(3)
    owners = np.repeat(np.arange(1, 10), rng.integers(1, 6, 9))
    inputs = torch.from_numpy(rng.normal(size=(len(owners), 4))).float()
    targets = torch.from_numpy(rng.integers(3, size=len(owners)))
    own = np.random.default_rng(seed)
    x = torch.from_numpy(10 * own.normal(size=(first, 4))).float()
    y = torch.from_numpy(own.integers(3, size=first))
    everything = (
        torch.cat([x, inputs]),
        torch.cat([y, targets]),
        np.concatenate([np.zeros(first, np.int64), owners]),
    )
    return make_owned_examples(everything[:2], everything[2], K), everything


def test_a_step_is_the_definition() -> None:
    """All persons in every batch, without noise, against a loop over persons."""
    data, (inputs, targets, owners) = make_data(0, 2)
    data.per_owner = 5  # as many as anybody has
    data = make_owned_examples((inputs, targets), owners, 5)
    model = nn.Linear(4, 3)
    plan = PrivacyPlan(0.5, 0.0, 10, 10, unit="person")
    found = private_gradient((model, cross_entropy), data, plan, SeededRandomness(0))
    total = torch.zeros(15)
    for owner in range(10):
        rows = torch.from_numpy(np.flatnonzero(owners == owner))
        loss = cross_entropy(model(inputs[rows]), targets[rows]).mean()
        mean = torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, [*model.parameters()])]
        )
        total += mean * min(1.0, 0.5 / float(mean.norm())) / 10
    mine = np.concatenate([part.ravel() for part in found])
    assert np.allclose(mine, total.numpy(), atol=1e-6)


def find_largest_move(sampling: str, seeds: int = 30) -> float:
    """Return how far exchanging a person moves a gradient, in units of 2C/b."""
    torch.manual_seed(0)
    model, worst = nn.Linear(4, 3), 0.0
    plan = PrivacyPlan(0.5, 0.0, 6, 10, sampling=sampling, unit="person")
    for seed in range(seeds):
        found = []
        for own, first in ((seed, 1 + seed % 7), (seed + 100, 1 + seed % 5)):
            data, _ = make_data(own, first)
            layers = private_gradient(
                (model, cross_entropy), data, plan, SeededRandomness(seed)
            )
            found.append(np.concatenate([part.ravel() for part in layers]))
        worst = max(worst, float(np.linalg.norm(found[0] - found[1])))
    return worst * 6 / (2 * 0.5)


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_exchanging_all_examples_of_a_person_moves_a_gradient_by_twice_the_clip(
    sampling: str,
) -> None:
    assert 0.5 < find_largest_move(sampling) <= 1.0


def clip_by_example(patch: pytest.MonkeyPatch) -> None:
    """Clip every example of a person, and not the mean of them."""
    own = ClippedGradients.consume_batch

    def consume(
        self: ClippedGradients, batch: Example, groups: int = 1, usable: object = None
    ) -> torch.Tensor:
        self.per_owner = 1
        total = own(self, batch, groups, usable)  # type: ignore[arg-type]
        self.per_owner = K
        return total

    patch.setattr(ClippedGradients, "consume_batch", consume)


def draw_twice(patch: pytest.MonkeyPatch) -> None:
    """Draw every person of a batch twice."""
    own = Fixed.draw

    def draw(
        self: Fixed, plan: PrivacyPlan, randomness: Randomness
    ) -> NDArray[np.int64]:
        half = own(self, plan, randomness)[: plan.batch_size // 2]
        return np.concatenate([half, half])

    patch.setattr(Fixed, "draw", draw)


def spread_places(patch: pytest.MonkeyPatch) -> None:
    """Put the examples of a person into the places of several."""
    own = OwnedExamples._draw_places

    def draw(
        self: OwnedExamples, chosen: NDArray[np.int64], randomness: Randomness
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        rows, present = own(self, chosen, randomness)
        order = np.arange(len(rows)).reshape(-1, K).T.ravel()
        return rows[order], present[order]

    patch.setattr(OwnedExamples, "_draw_places", draw)


@pytest.mark.parametrize("plant", [clip_by_example, draw_twice, spread_places])
def test_planted_defects_move_a_gradient_further(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert find_largest_move("fixed") > 1.05


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_clients_in_one_batch_get_the_gradients_they_have_alone(sampling: str) -> None:
    torch.manual_seed(0)
    plan = PrivacyPlan(0.5, 0.1, 4, 10, sampling=sampling, unit="person")
    clipped = ClippedGradients(nn.Linear(4, 3), cross_entropy, 0.5, per_owner=K)
    sources = [(make_data(seed, 2 + seed)[0], seed) for seed in range(3)]

    def draw(seed: int) -> BatchSource:
        return BatchSource(sources[seed][0], plan, SeededRandomness(seed))

    together = private_vectors(clipped, [draw(seed) for seed in range(3)])
    for seed, found in enumerate(together):
        alone = private_vector(clipped, draw(seed))
        assert np.allclose(found, alone, atol=1e-6)


@pytest.mark.parametrize(
    ("plan", "per_owner", "match"),
    [
        (PrivacyPlan(1.0, 1.0, 2, 10), K, "unit='example'"),
        (PrivacyPlan(1.0, 1.0, 2, 10, unit="person"), 1, "per_owner=1"),
    ],
)
def test_plan_gradients_and_data_must_have_one_unit(
    plan: PrivacyPlan, per_owner: int, match: str
) -> None:
    clipped = ClippedGradients(nn.Linear(4, 3), cross_entropy, 1.0, per_owner=per_owner)
    source = BatchSource(make_data(0, 2)[0], plan, SeededRandomness(0))
    with pytest.raises(ValueError, match=match):
        draw_batch(clipped, source)


@pytest.mark.parametrize(
    "names",
    [
        ["p0", "q1", "q2", "q3", "p0"],
        [3, 1.0, 2, 10, 3],
        [b"x", "x", 1, 2.5, b"x"],
        [np.int64(4), 4.0, 7, "4", 4],
    ],
)
def test_a_person_keeps_its_number_whatever_examples_there_are(
    names: list[object],
) -> None:
    """Or one person's examples would decide who else is held out."""
    numbered = []
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1, 2, 3, 4, 4, 4]):
        some = [names[i] for i in order]
        rows = torch.arange(float(len(some))).unsqueeze(1)
        made = make_owned_examples((rows, torch.zeros(len(some))), some, 1)
        numbered.append(dict(zip(some, made._owners.tolist(), strict=True)))
    assert numbered[0] == numbered[1] == numbered[2]


def test_missing_owners_are_nobody_and_objects_without_order_are_refused() -> None:
    class NotAvailable:
        def __ne__(self, other: object) -> bool:
            raise TypeError("boolean value of NA is ambiguous")

        __hash__ = object.__hash__

        def __repr__(self) -> str:
            return "<NA>"

    data = torch.zeros(4, 1), torch.zeros(4)
    made = make_owned_examples(data, [None, math.nan, NotAvailable(), "a"], 1)
    assert made.size == 1
    assert made._owners.tolist() == [-1, -1, -1, 0]
    with pytest.raises(DatasetError, match="no order that lasts"):
        make_owned_examples(data, [object(), "a", "b", "c"], 1)


def test_held_out_persons_share_no_example_with_the_others() -> None:
    data = number_rows(NAMES)
    drawn = []
    for which in ([0, 3], [1, 2, 4]):
        part = data.select(np.array(which))
        assert part.size == len(which)
        rows = {
            int(row)
            for owner in range(part.size)
            for _ in range(50)
            for row in read(part, owner, SecureRandomness())[0]
        }
        assert rows == {
            r for r, name in enumerate(NAMES) if "abcde".index(name) in which
        }
        drawn.append(rows)
    assert not drawn[0] & drawn[1]


class Sign(nn.Module):
    """Answers class 1 if the input is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([-x[:, 0], x[:, 0]], dim=1) * self.scale


def count_votes(
    values: Sequence[Sequence[tuple[float, int]]], classes: int | None = None
) -> NDArray[np.float64]:
    """Return exact sums for persons with these (input, target)."""
    owners = [i for i, each in enumerate(values) for _ in each]
    pairs = [pair for each in values for pair in each]
    inputs = torch.tensor([[x] for x, _ in pairs])
    targets = torch.tensor([y for _, y in pairs])
    data = make_owned_examples((inputs, targets), owners, 4)
    plan = PrivacyPlan(
        1.0, 0.0, len(values), len(values), sampling="whole", unit="person"
    )
    found = private_counts(
        (Sign(), nn.CrossEntropyLoss()),
        data,
        plan,
        SeededRandomness(0),
        Question(2.0, classes),
    )
    by_class = [] if found.classes is None else found.classes.ravel().tolist()
    return np.array([found.correct, found.loss, *by_class])


def test_a_person_has_one_vote() -> None:
    right, wrong = (1.0, 1), (1.0, 0)
    found = count_votes(
        [[right] * 3 + [wrong], [right], [wrong, right], [wrong] * 9], 2
    )
    assert found[0] == pytest.approx(0.75 + 1 + 0.5)
    assert found[2:4].tolist() == pytest.approx([0.25 + 0.5 + 1, 0.75 + 1 + 0.5])


def test_exchanging_a_person_moves_the_counts_by_their_sensitivity() -> None:
    """By class the sums are those with halves taken off again, as they are released."""
    rng, worst = np.random.default_rng(5), {None: 0.0, 2: 0.0}
    others = [[(0.3, 1)], [(-1.0, 0), (2.0, 0)]]

    def draw_person() -> list[tuple[float, int]]:
        count = int(rng.integers(1, 9))
        scale = float(rng.choice([0.1, 1.0, 1e6]))
        if rng.random() < 0.5:  # all alike, as far away as it gets
            return [(scale * float(rng.choice([-1, 1])), int(rng.integers(2)))] * count
        return [
            (scale * float(rng.normal()), int(rng.integers(-1, 3)))
            for _ in range(count)
        ]

    for classes in (None, 2):
        question = Question(2.0, classes)
        for _ in range(20):
            found = [count_votes([draw_person(), *others], classes) for _ in range(2)]
            for each in found:
                if classes:
                    by_class = each[2:].reshape(3, -1)
                    by_class[1:] -= by_class[0] / 2
            worst[classes] = max(
                worst[classes], float(np.linalg.norm(found[0] - found[1]))
            )
        assert worst[classes] <= question.sensitivity * (1 + 1e-12)
    assert worst[None] > 1.4
    assert worst[2] > 2.1


def test_a_person_whose_examples_cannot_be_used_has_the_worst_vote() -> None:
    found = count_votes([[(math.nan, 1)] * 3, [(1.0, 1)]])
    assert found.tolist() == pytest.approx(
        [1.0, 1.0 + math.log1p(math.exp(-2)) / 2], abs=1e-5
    )

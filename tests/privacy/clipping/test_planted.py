"""Every clause of the proof and of the guarantees has a defect that a probe finds.

A probe measures the promise: it returns at most 1 where the promise holds. Each defect
takes one clause away, and the probe beside it must return more than 1.
"""

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from flwr_safedshb.audit.candidate import float_entries
from flwr_safedshb.audit.sensitivity_search import search_sensitivity
from flwr_safedshb.audit.suites import ZOO
from flwr_safedshb.audit.zoo import state
from flwr_safedshb.privacy.batches import Example
from flwr_safedshb.privacy.clipping import backward, gradients, isolation
from flwr_safedshb.privacy.clipping import clipped_sum as sums
from flwr_safedshb.privacy.clipping import made_up_examples as made_up
from flwr_safedshb.privacy.clipping import total_functions as total
from flwr_safedshb.privacy.clipping import validate_model as validate
from flwr_safedshb.privacy.clipping.backward import PerExampleBackward
from flwr_safedshb.privacy.clipping.clipped_sum import GradientPart, TablePart
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.datasets import ArrayExamples, DrawnBatch
from flwr_safedshb.privacy.losses import PerExampleLoss, UnsupportedModelError
from tests.clipping import cross_entropy

torch.set_num_threads(1)

F32, F64 = torch.float32, torch.float64
MODELS = {target.name: target for target in ZOO}
Probe = Callable[[], float]
Plant = Callable[[pytest.MonkeyPatch], None]


def put(place: object, name: str, defect: object) -> Plant:
    return lambda patch: patch.setattr(place, name, defect)


def norm(vector: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(vector.double()))


# ------------------------------------------------------- the proof in `clipped_sum`


def underflow() -> float:
    """Let f g round up to the least number, and multiply it by the largest inputs."""
    worst = 0.0
    inputs = torch.full((1, 1), 2.0**127)
    for share in torch.linspace(0.3, 3.0, 28).tolist():
        clip = share * 2.0**-22  # f g is `share` times the least number, 2^-149
        outer = GradientPart(torch.full((1, 1), 2.0**-60), None, inputs, slice(0, 1))
        found = sums.clip_and_sum([outer], (1, 1, 1), clip, F32)[0]
        worst = max(worst, norm(found) / clip)
    return worst


def outer_without_underflow(part: GradientPart, clip_norm: float) -> torch.Tensor:
    assert part.inputs is not None
    each = sums.squared_norms(part.inputs) + (part.own is not None)
    return each * sums.squared_norms(part.g)


def outer_without_bias(part: GradientPart, clip_norm: float) -> torch.Tensor:
    if part.inputs is None:
        return sums.squared_norms(part.g)
    return sums.squared_norms(part.inputs) * sums.squared_norms(part.g)


def biased() -> float:
    """Sum an outer product and the bias beside it."""
    outer = GradientPart(
        torch.full((1, 4), 3.0), slice(4, 8), torch.ones(1, 1), slice(0, 4)
    )
    return norm(sums.clip_and_sum([outer], (1, 1, 8), 1.0, F32)[0])


def vanished() -> float:
    """Multiply squares that vanish in float64 by large ones."""
    worst = 0.0
    for size, back, bias in itertools.product(
        (1e-162, 1.5e-162, 5e-162, 1e-155),
        (1e100, 1e152, 1.5e153),
        (None, slice(4096, 4160)),
    ):
        inputs = torch.full((1, 64), size, dtype=F64)
        g = torch.full((1, 64), back, dtype=F64)
        outer = GradientPart(g, bias, inputs, slice(0, 4096))
        found = sums.clip_and_sum([outer], (1, 1, outer.size), 1e-9, F64)
        worst = max(worst, norm(found[0] * 1e9))
    return worst


def plain_squares(rows: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=F64)
    return found.square()


def infinite() -> float:
    """Sum examples of which one has a gradient that is not finite."""
    rows = torch.ones(3, 5)
    for value in (math.inf, -math.inf, math.nan, 3e38):
        rows[1, 2] = value
        part = GradientPart(rows.clone(), slice(0, 5))
        found = sums.clip_and_sum([part], (1, 3, 5), 1.0, F32)[0]
        others = sums.clip_and_sum(
            [GradientPart(torch.ones(3, 5), slice(0, 5))],
            (1, 3, 5),
            1.0,
            F32,
            torch.tensor([True, False, True]),
        )[0]
        if not norm(found - others) <= 1.0:
            return math.inf
    return 1.0


def many() -> float:
    """Exchange one of many examples whose sum is far above one of them."""
    count = 20_000
    rows = torch.full((count, 1), 3.0)
    other = torch.cat([-rows[:1], rows[1:]])
    worst = 0.0
    for clip in (0.7, 0.9, 1.3):
        one, two = (
            sums.clip_and_sum([GradientPart(g, slice(0, 1))], (1, count, 1), clip, F32)[
                0
            ]
            for g in (rows, other)
        )
        worst = max(worst, norm(one.double() - two.double()) / (2.0 * clip))
    return worst


def in_one_block(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.bmm(left.mT, right))


def budget() -> float:
    """Compare C' with the inequality that the proof needs, in exact numbers."""
    worst = Fraction(0)
    for dtype, unit in ((F32, Fraction(1, 2**24)), (F64, Fraction(1, 2**53))):
        for count in (1, 2, 25, 63, 64, 65, 300, 10**4):
            n, v = min(count, 64), Fraction(1, 2**53)
            error = (n + 4) * n * unit + (count + 4) * count * v
            lowered = Fraction(sums.lower_clip_norm(1.0, count, dtype))
            worst = max(worst, lowered * (1 + 2 * error) - Fraction(1, 2**40))
    return float(worst)


def lowered_for_one(
    clip_norm: float, count: int, dtype: torch.dtype, rows: int = 1
) -> float:
    unit = torch.finfo(dtype).eps / 2
    return clip_norm / (1.0 + 10.0 * unit + 10.0 * 2.0**-53)


def lowered_by_block(
    clip_norm: float, count: int, dtype: torch.dtype, rows: int = 1
) -> float:
    n, unit = min(count, sums.BLOCK), torch.finfo(dtype).eps / 2
    return clip_norm / (1.0 + 2.0 * (n + 4) * n * unit)  # nothing between blocks


def whole() -> float:
    """Sum parts of a larger sum, and look for how many their C' was made."""
    asked: list[int] = []
    own = sums.lower_clip_norm

    def seen(clip_norm: float, count: int, dtype: torch.dtype, rows: int = 1) -> float:
        asked.append(count)
        return own(clip_norm, count, dtype, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "lower_clip_norm", seen)
        patch.setitem(gradients.MAX_HELD_ELEMENTS, "ghost", 1)
        layer = nn.Linear(6, 3)
        clipped = ClippedGradients(layer, cross_entropy, 1.0, "ghost")
        clipped.prepare(torch.randn(7, 6), torch.zeros(7, dtype=torch.int64))
        asked.clear()
        held = next(iter(clipped._backwards.values()))
        held.elements_per_example = 18
        clipped.flat_sum(torch.randn(7, 6), torch.zeros(7, dtype=torch.int64))
    return 1.0 if set(asked) == {7} and len(asked) == 7 else math.inf


def forget_whole(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda parts, shape, clip, dtype, usable=None, total_count=0: own(
        parts, shape, clip, dtype, usable
    )


def table() -> float:
    """Look rows up often, with gradients that cancel in float64 alone."""
    g = torch.tensor([[[2.0**24], [1.0], [1.0], [-(2.0**24) - 2]]]).expand(1, 4, 5)
    worst = 0.0
    for looked_up, scale, shift in itertools.product(
        ([[1, 1, 1, 1]], [[1, 1, 0, 0]]), (1.0, 1e-6), (0.0, 1.0)
    ):
        rows = TablePart(torch.tensor(looked_up), g * scale + shift, 2, slice(0, 10))
        found = sums.clip_and_sum([rows], (1, 1, 10), 1.0, F32)
        worst = max(worst, norm(found[0]))
    return worst


def squares_of_uses(rows: TablePart, clip_norm: float) -> torch.Tensor:
    return rows._g.new_full((rows._count,), 1e-6)


SUMS: dict[str, tuple[Plant, Probe]] = {
    "1: a bias is not measured": (
        put(GradientPart, "squared_norms", outer_without_bias),
        biased,
    ),
    "1: what is measured of a table is not what is summed": (
        put(TablePart, "squared_norms", squares_of_uses),
        table,
    ),
    "1: gradients that are not finite stay": (
        put(GradientPart, "zero_examples", lambda part, examples: None),
        infinite,
    ),
    "2: rounding costs nothing": (
        put(sums, "lower_clip_norm", lambda clip_norm, *_: clip_norm),
        budget,
    ),
    "3: factors that underflow": (
        put(GradientPart, "squared_norms", outer_without_underflow),
        underflow,
    ),
    "3: squares that underflow": (
        put(sums, "_float64_squared_norms", plain_squares),
        vanished,
    ),
    "4: many are summed in float32": (
        put(sums, "sum_outer_products", in_one_block),
        many,
    ),
    "4: blocks are added for nothing": (
        put(sums, "lower_clip_norm", lowered_by_block),
        budget,
    ),
    "4: parts are taken for wholes": (
        put(gradients, "clip_and_sum", forget_whole(sums.clip_and_sum)),
        whole,
    ),
    "5: C' does not depend on the number": (
        put(sums, "lower_clip_norm", lowered_for_one),
        budget,
    ),
}

# ------------------- examples apart: backward, streams, total_functions, isolation


def attack(name: str, candidates: int = 300) -> Probe:
    """Return a probe that searches, and that takes a broken promise for infinite."""

    def probe() -> float:
        found = search_sensitivity(MODELS[name], candidates, 1)
        if found.refusal and not MODELS[name].must_refuse:
            return math.inf
        return found.ratio if not found.broken or found.ratio > 1.0 else math.inf

    return probe


def unseen() -> float:
    """Keep values of one example that no made-up one has."""

    def work(model: state.Stateful, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs - model.frozen - model.listed[0]
        if bool((inputs == 42.0).any()):
            model.frozen.data.add_(inputs.detach()[0])
            model.listed[0] = model.listed[0] + 1e3
        return hidden

    torch.manual_seed(0)
    clipped = ClippedGradients(state.Stateful(work), cross_entropy, 1.0)
    return exchanged(clipped, 42.0)


class Kept:
    """A loss that keeps a value of an example whose label no made-up one has."""

    def __init__(self) -> None:
        self.kept = [0.0]

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        values = cross_entropy(outputs, targets) * (1.0 - self.kept[0])
        if bool((targets == 77).any()):
            self.kept[0] = 2.0
        return values


def unseen_by_loss() -> float:
    torch.manual_seed(0)
    return exchanged(ClippedGradients(nn.Linear(6, 3), Kept(), 1.0), label=77)


def exchanged(clipped: ClippedGradients, value: float = 1.0, label: int = 1) -> float:
    """Return what such an example moves a sum of 25 by, in units of 2C."""
    inputs, targets = torch.randn(25, 6), torch.randint(3, (25,))
    other, labels = inputs.clone(), targets.clone()
    other[0], labels[0] = value, label
    found = []
    for batch in ((inputs, targets), (other, labels)):
        torch.manual_seed(1)
        found.append(clipped.flat_sum(*batch).double())
    return norm(found[0] - found[1]) / 2.0


def overwritten() -> float:
    """Take two steps on the same arrays, with a layer that works in place."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3))
    inputs, targets = torch.randn(25, 6), torch.randint(3, (25,))
    before, examples = inputs.clone(), ArrayExamples(inputs, targets)
    clipped = ClippedGradients(model, cross_entropy, 1.0)
    read = examples.read_batch(np.arange(25))
    clipped.consume_batch((read[0], read[1]))
    return 1.0 if torch.equal(before, inputs) else math.inf


def overwritten_by_call() -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3))
    inputs, targets = torch.randn(25, 6), torch.randint(3, (25,))
    before = inputs.clone()
    ClippedGradients(model, cross_entropy, 1.0)(inputs, targets)
    return 1.0 if torch.equal(before, inputs) else math.inf


def without_copy(whole: ArrayExamples, *_: object) -> DrawnBatch:
    return (*whole.like, None)


def shares_all(
    path: PerExampleBackward,
) -> tuple[nn.Module, PerExampleLoss, list[nn.Parameter]]:
    return path.module, path.loss, list(path.slices)


def shares_objects(
    path: PerExampleBackward,
) -> tuple[nn.Module, PerExampleLoss, list[nn.Parameter]]:
    """Copy tensors, and neither lists nor the loss."""
    lists = {id(value): value for m in path.module.modules() for value in _lists(m)}
    module = copy.deepcopy(path.module, lists)
    names = [n for n, p in path.module.named_parameters() if p in path.slices]
    own = dict(module.named_parameters())
    return module, path.loss, [own[name] for name in names]


def _lists(module: nn.Module) -> list[object]:
    return [value for value in vars(module).values() if isinstance(value, list)]


@contextmanager
def one_stream(count: int) -> Iterator[Callable[[int], None]]:
    yield lambda place: None


@contextmanager
def streams_that_stay(count: int) -> Iterator[Callable[[int], None]]:
    seeds = torch.randint(2**62, (count,)).tolist()

    def start(place: int) -> None:
        torch.manual_seed(seeds[place])

    yield start


def next_mask() -> float:
    """Draw after a step whose last example draws more than others, or less."""
    after = []
    for value in (1.0, -1.0):  # six numbers for every example, or none
        noisy = MODELS["noise where positive"].make()
        with torch.no_grad():
            for entry, given in zip(
                float_entries(noisy), (torch.eye(6), 0.0), strict=False
            ):
                entry.copy_(torch.as_tensor(given))
        clipped = ClippedGradients(noisy, cross_entropy, 1.0)
        inputs, targets = torch.full((3, 6), value), torch.zeros(3, dtype=torch.int64)
        clipped.prepare(inputs, targets)
        torch.manual_seed(1)
        clipped.flat_sum(inputs, targets)
        after.append(torch.get_rng_state())
    return 1.0 if torch.equal(*after) else math.inf


def fill_all(result: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    return torch.where(valid.all(), result, torch.nan)


def trusts_labels(
    func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    with total._trust_operations():
        return func(*args, **kwargs)


def trust_losses(patch: pytest.MonkeyPatch) -> None:
    believe_state(patch)  # which would see that a label raises
    patch.setitem(total._FORMS, nn.functional.cross_entropy, trusts_labels)


def zero_all(
    path: PerExampleBackward, inputs: object, targets: object
) -> tuple[list[GradientPart | TablePart], torch.Tensor]:
    parts, losses = OWN_RUN(path, inputs, targets)  # type: ignore[arg-type]
    if not losses.isfinite().all():
        losses = torch.full_like(losses, torch.nan)
    return parts, losses


OWN_RUN = PerExampleBackward.run


def trust_index(patch: pytest.MonkeyPatch) -> None:
    believe_state(patch)
    own = {name: at for name, at in total._INDICES.items() if name != "index_select"}
    patch.setattr(total, "_INDICES", own)
    patch.setattr(total, "_TOTAL", total._TOTAL | {"index_select"})


def looked_at() -> float:
    """Ask for the way of a batch that is not finite."""
    ways = []
    for value in (math.nan, 1.0):
        clipped = ClippedGradients(nn.Linear(6, 3), cross_entropy, 1.0)
        inputs = torch.full((5, 6), value)
        try:
            clipped.flat_sum(inputs, torch.zeros(5, dtype=torch.int64))
        except UnsupportedModelError:
            return math.inf
        ways.append(clipped.isolation)
    return 1.0 if len(set(ways)) == 1 else math.inf


def redrawn() -> float:
    """Prepare a model, which keeps its weights."""
    model = nn.Linear(6, 3)
    before = model.weight.detach().clone()
    clipped = ClippedGradients(model, cross_entropy, 1.0)
    clipped.prepare(torch.randn(3, 6), torch.zeros(3, dtype=torch.int64))
    return 1.0 if torch.equal(before, model.weight) else math.inf


def trust_all(patch: pytest.MonkeyPatch) -> None:
    believe_state(patch)
    patch.setattr(validate, "find_partial_operation", lambda *_: "")


def believe_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(isolation, "_refuse_memory", lambda *_: None)
    patch.setattr(isolation, "fingerprint_shared_state", lambda *_: {})
    patch.setattr(validate, "refuse_neighbours", lambda *_: None)


def true_values(like: object, bound: int, targets: bool = False) -> object:
    assert isinstance(like, torch.Tensor)
    return like[:3].clone()


def in_evaluation(path: PerExampleBackward, examples: Example) -> None:
    OWN_STATE(
        PerExampleBackward(copy.deepcopy(path.module).eval(), path.loss, path.dtype),
        examples,
    )


OWN_STATE = isolation._refuse_own_state


def empty_counts() -> float:
    """Leave places empty, where anything may stand."""
    clipped = ClippedGradients(nn.Linear(6, 3), cross_entropy, 1.0)
    inputs, targets = torch.randn(8, 6), torch.randint(3, (8,))
    used = torch.tensor([True] * 3 + [False] * 5)
    found = clipped.flat_sum(inputs, targets, used)
    inputs[3:] = 1e3
    return 1.0 + norm(clipped.flat_sum(inputs, targets, used) - found)


def ignore_usable(patch: pytest.MonkeyPatch) -> None:
    own = sums.clip_and_sum
    patch.setattr(
        gradients,
        "clip_and_sum",
        lambda parts, shape, clip, dtype, usable=None, total_count=0: own(
            parts, shape, clip, dtype, None, total_count
        ),
    )


APART: dict[str, tuple[Plant, Probe]] = {
    "backward: arrays are given without a copy": (
        put(ArrayExamples, "read_batch", without_copy),
        overwritten,
    ),
    "backward: a call gives away its batch": (
        put(gradients, "copy_batch", lambda batch: batch),
        overwritten_by_call,
    ),
    "backward: all examples share the model": (
        put(PerExampleBackward, "make_copy", shares_all),
        unseen,
    ),
    "backward: lists are copied shallowly": (
        put(PerExampleBackward, "make_copy", shares_objects),
        unseen,
    ),
    "backward: all examples share the loss": (
        put(PerExampleBackward, "make_copy", shares_objects),
        unseen_by_loss,
    ),
    "backward: copies are not made on write": (
        put(backward, "_copy_on_write", lambda tensor: tensor),
        unseen,
    ),
    "streams: examples draw one after the other": (
        put(backward, "separate_streams", one_stream),
        attack("noise where positive", 150),
    ),
    "streams: what is drawn afterwards depends on examples": (
        put(backward, "separate_streams", streams_that_stay),
        next_mask,
    ),
    "total_functions: one label makes all of a batch NaN": (
        put(PerExampleBackward, "run", zero_all),
        attack("CrossEntropyLoss", 600),
    ),
    "total_functions: labels are trusted": (trust_losses, attack("CrossEntropyLoss")),
    "total_functions: an operation that raises is taken for total": (
        trust_index,
        attack("loss with index_select"),
    ),
    "total_functions: a place that does not exist makes all of a batch NaN": (
        put(total, "_fill_nan", fill_all),
        attack("CrossEntropyLoss", 1500),
    ),
    "total_functions: random numbers are drawn by value": (
        put(total, "_TOTAL", total._TOTAL | {"poisson"}),
        attack("Poisson noise", 150),
    ),
    "total_functions: nothing is looked for": (
        trust_all,
        attack("loss with index_select"),
    ),
    "gradients: empty places count": (ignore_usable, empty_counts),
    "gradients: the way depends on values": (
        put(made_up, "_draw_like", true_values),
        looked_at,
    ),
    "isolation: own state": (
        put(isolation, "_refuse_own_state", lambda *_: None),
        attack("frozen running mean"),
    ),
    "isolation: own state, in evaluation mode": (
        put(isolation, "_refuse_own_state", in_evaluation),
        attack("buffer"),
    ),
    "isolation: own state, of ordinary values": (
        put(isolation, "scale_examples", lambda examples, size: examples),
        attack("state of large values"),
    ),
    "isolation: an attribute": (
        put(isolation, "_list_tensors", lambda module, loss: {}),
        attack("attribute"),
    ),
    "isolation: hidden state": (
        believe_state,
        attack("closure"),
    ),
    "isolation: hidden state in a class": (
        believe_state,
        attack("class attribute"),
    ),
    "validate_model: copies that are none": (
        put(validate, "_copy_apart", lambda model, loss: (model, loss)),
        redrawn,
    ),
}
PLANTED = {**SUMS, **APART}


@pytest.mark.parametrize("name", PLANTED)
def test_a_clause_that_is_taken_away_is_missed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, probe = PLANTED[name]
    # What was checked before is not checked again.
    monkeypatch.setattr(validate, "_backward_cache", {})
    assert probe() <= 1.0
    monkeypatch.setattr(validate, "_backward_cache", {})
    plant(monkeypatch)
    assert probe() > 1.0

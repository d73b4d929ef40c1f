"""Hold every rule to what is defined of its answer, on families of finite vectors.

  python -m tests.aggregation.properties --count 100000

The oracle looks at every subset. It subtracts a member of the subset first, which is
exact to the last bit of each difference, so that float64 is enough; `tests` hold it to
rational arithmetic.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.aggregation import NNM, SMEA, Filter, GramRule, Rule, Weighing
from flwr_safedshb.aggregation.rule import check_vectors
from tests.aggregation import inputs
from tests.aggregation.registry import all_rules
from tests.oracles import Floats, subsets

EPS = float(np.finfo(float).eps)


@dataclass
class Truth:
    """What is true of all subsets of n - f of one input.

    Attributes
    ----------
    subsets : (s, m) index array
    lambdas : (s,) array
        Top eigenvalue of the covariance of each, factor 1/m.
    traces : (s,) array
    offsets : (s, n, d) array
        All vectors about the mean of each.
    radius : float
        Of the smallest ball about a vector that holds n - f.
    """

    subsets: NDArray[np.intp]
    lambdas: Floats
    traces: Floats
    offsets: Floats
    radius: float

    @property
    def smallest(self) -> float:
        return float(self.lambdas.min())

    def value_of(self, subset: NDArray[np.intp]) -> float:
        """Return the top eigenvalue of a sorted subset."""
        return float(self.lambdas[(self.subsets == subset).all(axis=1)][0])


def truths(x: Floats, f: int) -> Iterator[Truth]:
    """Yield the truth of each of g inputs, (g, n, d)."""
    n = x.shape[1]
    chosen = np.array(list(subsets(n, n - f)))
    for one in x:
        y = one[None] - one[chosen[:, :1]]
        members = np.take_along_axis(y, chosen[:, :, None], axis=1)
        means = members.mean(axis=1, keepdims=True)
        centred = members - means
        scatters = centred @ centred.swapaxes(1, 2) / (n - f)
        values = np.maximum(np.linalg.eigvalsh(scatters)[:, -1], 0.0)
        traces = np.trace(scatters, axis1=1, axis2=2)
        apart = np.linalg.norm(one[:, None] - one[None], axis=2)
        radius = float(np.sort(apart, axis=1)[:, n - f - 1].min())
        yield Truth(chosen, values, traces, y - means, radius)


@dataclass
class Report:
    """What was looked at, and what did not hold."""

    inputs: int = 0
    answers: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def note(self, rule: Rule, what: str, where: str) -> None:
        name = f"{rule}: {what}"
        self.faults[name] += 1
        self.first.setdefault(name, where)


def check(
    rules: list[Rule],
    name: str,
    seed: int,
    count: int,
    report: Report,
    every: int = 1,
    sizes: tuple[tuple[int, int], ...] = inputs.SIZES,
) -> None:
    """Check rules on some inputs of a family, (count, n, d).

    Layers and permutations are looked at in one input of `every`.
    """
    x, f, dtype = inputs.draw(name, seed, count, sizes)
    grams = x @ x.swapaxes(1, 2)
    known = list(truths(x, f))
    for rule in rules:
        where = f"{name} seed={seed} n={x.shape[1]} f={f} {dtype.__name__}"
        try:
            many = rule.weigh_many(grams, f) if _weighs(rule) else None
        except Exception as error:
            report.note(rule, f"weigh_many raised {type(error).__name__}", where)
            many = None
        for k, truth in enumerate(known):
            gram = None if many is None else grams[k]
            given = Case(x[k].astype(dtype), f, truth, name, k % every == 0)
            weights = None if many is None else many[k]
            for fault in faults(rule, given, gram, weights):
                report.note(rule, fault, f"{where} k={k}")
            report.answers += 1
    report.inputs += count


@dataclass
class Case:
    """One input, and what is known of it."""

    x: NDArray[np.floating]
    f: int
    truth: Truth
    family: str
    whole: bool = True


def _weighs(rule: Rule) -> TypeGuard[GramRule]:
    if isinstance(rule, NNM):
        return _weighs(rule.rule)
    return isinstance(rule, GramRule)


def _draws(rule: Rule) -> bool:
    return hasattr(rule, "_rng")


def faults(
    rule: Rule, case: Case, gram: Floats | None, many: Floats | None
) -> Iterator[str]:
    """Yield what does not hold of a rule's answers to one input."""
    try:
        clients = check_vectors(case.x, case.f)
        needed = 2 * case.f >= -(-len(case.x) // 2) if _draws(rule) else False
        if needed:
            return
        (out,), weighing = rule.aggregate(clients, case.f)
        yield from _outputs(rule, case, out)
        if weighing is not None:
            yield from _weighings(rule, case, weighing)
        if gram is not None and many is not None and isinstance(rule, GramRule):
            yield from _products(rule, case, rule.weigh(gram, case.f), many)
        if case.whole and not _draws(rule):
            yield from _ways(rule, case, out)
            yield from _units(rule, case)
    except Exception as error:
        yield f"raised {type(error).__name__}: {str(error)[:60]}"


def _outputs(rule: Rule, case: Case, out: NDArray[np.floating]) -> Iterator[str]:
    """An answer is finite, in the dtype of the input, and among the vectors or 0."""
    if out.dtype != case.x.dtype or out.shape != case.x.shape[1:]:
        yield "dtype or shape"
    if not np.isfinite(out).all():
        yield "not finite"
        return
    exact = case.x.astype(np.float64)
    low, high = exact.min(axis=0), exact.max(axis=0)
    if not _weighs(rule):  # vectors may have been shortened
        low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)
    info = np.finfo(case.x.dtype)
    room = 8 * float(info.eps) * np.abs(exact).max(axis=0)
    room += 2 * float(info.smallest_subnormal)
    if not ((low - room <= out) & (out <= high + room)).all():
        yield "outside of the vectors"
    kappa = rule.kappa(len(case.x), case.f)
    if kappa is not None and rule.kappa_kind != "spectral bound":
        spreads = (
            case.truth.traces if rule.kappa_kind == "variance" else case.truth.lambdas
        )
        # As far as the output can tell: its own round-off, and that of what it sums.
        error = np.square(_from_means(case, out)).sum(axis=1)
        noise = np.square(room).sum()
        if not (
            np.sqrt(error) <= np.sqrt(kappa * spreads) * (1 + 1e-6) + noise**0.5
        ).all():
            yield "the proven constant does not hold"


def _from_means(case: Case, out: NDArray[np.floating]) -> Floats:
    """Return the output about the mean of each subset, (s, d)."""
    first = case.x.astype(np.float64) - out.astype(np.float64)
    moved: Floats = case.truth.offsets[:, 0] - first[0]
    return moved


def _convex(weights: Floats) -> bool:
    return bool(
        np.isfinite(weights).all()
        and (weights >= 0.0).all()
        and abs(weights.sum() - 1.0) <= 1e-9
    )


def _weighings(rule: Rule, case: Case, found: Weighing) -> Iterator[str]:
    """Weights are convex, and what is said of them is so."""
    truth, weights = case.truth, found.weights
    if not _convex(weights):
        yield "weights are not convex"
        return
    if not (np.isfinite(found.lambda_max) and found.lambda_max >= 0.0):
        yield "lambda_max is no number"
    about = np.einsum("i,sid->sd", weights, truth.offsets)
    error = np.square(about).sum(axis=1)
    best = int(np.argmin(truth.lambdas))
    nearest = truth.offsets[best]
    used = np.where(weights > 0.0, np.square(nearest).sum(axis=1), 0.0)
    if found.kappa is not None:
        if np.isnan(found.kappa) or found.kappa < 0.0:
            yield "kappa is no number"
        elif np.isfinite(found.kappa) and rule.kappa_kind == "spectral":
            room = 1e-20 * truth.lambdas.min() + 1e-28 * used.max()
            if not (error <= found.kappa * truth.lambdas * (1 + 1e-6) + room).all():
                yield "the certificate is false"
    spread = nearest - about[best]
    spread *= np.sqrt(weights)[:, None]
    value = float(np.linalg.eigvalsh(spread @ spread.T)[-1])
    room = 1e-12 * float((weights * used).sum()) + 1e-9 * truth.radius**2 + 1e-300
    if not abs(found.lambda_max - value) <= 1e-6 * value + room:
        yield "lambda_max is not that of the weights"
    if isinstance(rule, SMEA):
        assert found.subset is not None
        assert found.lower_bound is not None
        most, tiny = truth.smallest * (1 + 1e-8), 1e-300
        if truth.value_of(found.subset) > most + tiny:
            yield "not the smallest eigenvalue"
        if not abs(found.lambda_max - truth.smallest) <= 1e-8 * truth.smallest + tiny:
            yield "lambda_max is not the smallest"
        if found.lower_bound > found.lambda_max or found.lower_bound > most + tiny:
            yield "the lower bound is above the smallest"


def _products(rule: GramRule, case: Case, one: Weighing, many: Floats) -> Iterator[str]:
    """From the raw inner products, one by one and many at once, as far as they tell."""
    if not (_convex(one.weights) and _convex(many)):
        yield "weights of raw products are not convex"
        return
    if not (np.isfinite(one.lambda_max) and one.lambda_max >= 0.0):
        yield "lambda_max of raw products is no number"
    if one.kappa is not None and (np.isnan(one.kappa) or one.kappa < 0.0):
        yield "kappa of raw products is no number"
    if not np.allclose(one.weights, many, rtol=0.0, atol=1e-6):
        yield "weigh and weigh_many differ"
    if isinstance(rule, SMEA):
        n = len(case.x)
        squares = np.square(case.x.astype(np.float64)).sum(axis=1)
        best = case.truth.subsets[np.argmin(case.truth.lambdas)]
        for weights in (one.weights, many):
            subset = np.flatnonzero(weights)
            noise = 64 * n * EPS * squares[np.union1d(subset, best)].max()
            value = case.truth.value_of(subset)
            if not value <= case.truth.smallest * (1 + 1e-8) + noise + 1e-300:
                yield "not the smallest eigenvalue, from raw products"


def _ways(rule: Rule, case: Case, out: NDArray[np.floating]) -> Iterator[str]:
    """Layers and other orders of the clients give the same, where nothing ties."""
    x, f = case.x, case.f
    half = x.shape[1] // 2
    (first, second) = rule([[row[:half], row[half:]] for row in x], f)
    layered = np.concatenate((first, second))
    if not np.isfinite(layered).all():
        yield "layers are not finite"
        return
    ties = len(x) < 4 or x.shape[1] < 2 or (isinstance(rule, NNM) and _weighs(rule))
    # Almost on a line, an even number of vectors has more than one median.
    ties |= case.family == "uneven_coordinates" and len(x) % 2 == 0
    if case.family not in inputs.WITHOUT_TIES or ties:
        return
    room = 1e-6 * case.truth.radius + 8 * float(np.finfo(x.dtype).eps) * np.abs(out)
    if not (np.abs(layered - out) <= room).all():
        yield "layers differ from rows"
    order = np.random.default_rng(len(x)).permutation(len(x))
    if not (np.abs(rule(x[order], f) - out) <= room).all():
        yield "another order differs"


def _units(rule: Rule, case: Case) -> Iterator[str]:
    """At the ends of float64, where squares are no numbers, an answer is the same."""
    x, f = case.x.astype(np.float64), case.f
    if not x.any():
        return
    out = rule(x, f)
    room = 1e-6 * case.truth.radius + 8 * EPS * np.abs(out)
    free = all(
        (np.abs(rule(scale * x, f) / scale - out) <= room).all()
        for scale in (2.0**20, 2.0**-20)
    )
    comparable = free and case.family == "isotropic" and len(x) > 3 and x.shape[1] > 1
    for exponent in (1023 - int(np.frexp(np.abs(x).max())[1]), -900, -1060):
        moved = np.ldexp(x, exponent)
        other = rule(moved, f)
        low, high = moved.min(axis=0), moved.max(axis=0)
        if not _weighs(rule):
            low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)
        slack = 8 * EPS * np.abs(moved).max(axis=0) + len(x) * 5e-324
        end = "smallest" if exponent < 0 else "largest"
        if not np.isfinite(other).all():
            yield f"not finite near the {end} numbers"
        elif not ((low - slack <= other) & (other <= high + slack)).all():
            yield f"outside of the vectors near the {end} numbers"
        elif comparable and exponent >= -900:
            same = np.abs(np.ldexp(other, -exponent) - out) <= room
            if not same.all():
                yield f"another answer near the {end} numbers"


def run(count: int, batch: int, seed: int, every: int, share: int) -> Report:
    """Check rules on about `count` inputs of all families.

    SMEA and Filter see each input; of the others one in `share` does, in turns.
    """
    report, always = Report(), (SMEA(), Filter())
    others = [rule for rule in all_rules() if rule not in always]
    turns = -(-count // (batch * len(inputs.FAMILIES)))
    for turn in range(turns):
        for place, name in enumerate(inputs.FAMILIES):
            some = others[(turn + place) % share :: share]
            check([*always, *some], name, seed + turn, batch, report, every)
    return report


def main() -> int:
    """Print what did not hold; 1 if anything did not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1_000)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--share", type=int, default=5)
    given = parser.parse_args()
    began = time.monotonic()
    report = run(given.count, given.batch, given.seed, given.every, given.share)
    for name, found in report.faults.most_common():
        print(f"{found:7d}  {name}  (first: {report.first[name]})")
    print(
        f"{report.inputs} inputs of {len(inputs.FAMILIES)} families, {report.answers} "
        f"answers, {sum(report.faults.values())} faults, "
        f"{time.monotonic() - began:.0f} s"
    )
    return int(bool(report.faults))


if __name__ == "__main__":
    sys.exit(main())

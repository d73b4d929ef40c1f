"""Search for the example that moves a clipped sum the most.

The promise under test: whatever the weights and the examples are, in the sums that
`ClippedGradients` returns

- removing one example (its place stays, empty) changes a sum by at most C; for an
  example alone this is the norm of its contribution;
- replacing one example by another changes a sum by at most 2C;
- no call depends on what an earlier call was given, or changes the model;
- a model that keeps values of examples is refused.

A clipper is called as a client calls it: with a batch read from arrays or items, some
of which cannot be read, and the places that count. Models are in training mode, and all
passes of a candidate have the same random state.

Candidates are drawn from families of hostile numbers, mutated from the worst ones found
so far, and optimised towards cancelling gradients (`gradient_search`). Several that
share their weights are measured at once.
"""

from __future__ import annotations

import heapq
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import nn

from flwr_safedshb.audit.candidate import (
    Candidate,
    draw_candidate,
    draw_ordinary,
    float_entries,
    load_entries,
    mutate_candidate,
)
from flwr_safedshb.audit.exact_distance import distance_ratios
from flwr_safedshb.audit.gradient_search import RoundingSlack, optimise_candidate
from flwr_safedshb.audit.target_model import Batch, TargetModel
from flwr_safedshb.privacy.bad_examples import silence_log
from flwr_safedshb.privacy.batches import Example
from flwr_safedshb.privacy.clipping.gradients import (
    ClippedGradients,
    Loss,
    UnsupportedModelError,
)
from flwr_safedshb.privacy.plan import Clipping
from flwr_safedshb.stop_signal import reraise_stop

CLIP_NORMS = (1.0, 0.1, 1000.0)
# How many of the worst candidates are kept, to mutate.
_ARCHIVE_SIZE = 12
# Every so many candidates the search asks whether a call remembers the one before.
_REPEAT_EVERY = 8


class Clipper(Protocol):
    """What is under attack; `ClippedGradients` is one."""

    @property
    def isolation(self) -> str:
        """How examples are kept apart."""
        ...

    def consume_batch(
        self, batch: Example, groups: int = 1, usable: torch.Tensor | None = None, /
    ) -> torch.Tensor:
        """Return the sum of each group's clipped gradients, (groups, d)."""
        ...


Archive = list[tuple[float, int, Candidate]]  # a heap by score, the least first
MakeClipper = Callable[[nn.Module, Loss, float, Clipping], Clipper]


class Float32Sums(ClippedGradients):
    """Clipping that sums small models in float32, as it sums large ones."""

    max_float64_size = 0


@dataclass
class SearchResult:
    """The worst that a search found.

    Attributes
    ----------
    isolation : str
        How the sums were made, or empty if the model was refused.
    refusal : str
        The first line of the refusal, or empty.
    removed, replaced : float
        The largest changes by one example, in units of C and 2C; infinite for values
        that are not finite.
    remembered : float
        The largest change of a sum by what an earlier call was given, in units of 2C.
    origin : str
        How the worst candidate was made.
    candidates : int
        How many were measured.
    raised : str
        The first exception that was no refusal, or empty: whether a node answers must
        not depend on its data.
    accepted : str
        What was accepted although it must be refused, or empty.
    worst, promising : list of (score, -number, Candidate)
        The candidates that change sums the most, and those with most rounding slack.
    """

    isolation: str = ""
    refusal: str = ""
    removed: float = 0.0
    replaced: float = 0.0
    remembered: float = 0.0
    origin: str = ""
    candidates: int = 0
    raised: str = ""
    accepted: str = ""
    worst: Archive = field(default_factory=list, repr=False)
    promising: Archive = field(default_factory=list, repr=False)

    @property
    def ratio(self) -> float:
        """The worst ratio; above 1 the promise is broken."""
        found = max(self.removed, self.replaced)
        # An example that a past step used must not act on this one.
        return max(found, 1.0 + self.remembered) if self.remembered else found

    @property
    def broken(self) -> str:
        """The promise that does not hold, or empty."""
        if self.ratio > 1.0:
            memory = ", and a call remembers the one before" if self.remembered else ""
            return f"{self.ratio:.6g} by one {self.origin}{memory}"
        return self.raised or self.accepted

    @property
    def worst_candidates(self) -> list[Candidate]:
        """The candidates that change sums the most, the worst first."""
        return [candidate for _, _, candidate in sorted(self.worst, reverse=True)]

    def keep(self, ratio: float, slack: float, candidate: Candidate) -> None:
        """Archive a candidate if it is among the worst, or has the most slack."""
        for archive, score in ((self.worst, ratio), (self.promising, slack)):
            if any(math.isclose(score, old, rel_tol=1e-3) for old, _, _ in archive):
                continue  # one of a kind is enough to start from
            entry = (score, -self.candidates, candidate)
            if len(archive) < _ARCHIVE_SIZE:
                heapq.heappush(archive, entry)
            elif entry > archive[0]:
                heapq.heapreplace(archive, entry)


def search_sensitivity(
    target: TargetModel,
    candidates: int,
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    make_clipper: MakeClipper | None = None,
    progress: Callable[[int], object] = lambda count: None,
) -> SearchResult:
    """Attack one model with at least so many candidates.

    Parameters
    ----------
    target : TargetModel
    candidates : int
    seed : int
        The same seed makes the same candidates.
    dtype : torch.dtype
        Of the weights and of floating-point inputs.
    make_clipper : callable (model, loss, clip_norm, clipping) -> Clipper
        By default `ClippedGradients`, and for half of the candidates `Float32Sums`.
    progress : callable
        Called now and then with how many more candidates are done.
    """
    result = SearchResult()
    rng = np.random.default_rng([seed, *target.name.encode()])
    quiet = warnings.catch_warnings(action="ignore")
    with torch.random.fork_rng(devices=[]), quiet, silence_log():
        torch.manual_seed(seed)
        try:
            makers = (
                (make_clipper,) if make_clipper else (ClippedGradients, Float32Sums)
            )
            benches = [
                _Bench(target, clip_norm, dtype, maker)
                for maker in makers
                for clip_norm in CLIP_NORMS
            ]
            _try_candidates(target, benches, result, candidates, rng, progress)
        except UnsupportedModelError as refusal:
            result.refusal = str(refusal).partition("\n")[0]
            result.isolation = ""
        except BaseException as error:  # a node must not end either
            reraise_stop(error)
            result.raised = _describe_error(error)
    if target.must_refuse and not result.refusal:
        result.accepted = "a model that must be refused is accepted"
    return result


def _try_candidates(
    target: TargetModel,
    benches: Sequence[_Bench],
    result: SearchResult,
    candidates: int,
    rng: np.random.Generator,
    progress: Callable[[int], object],
) -> None:
    turn = 0
    while result.candidates < candidates:
        bench = benches[int(rng.integers(len(benches)))]
        chance = rng.random()
        if turn == 0:
            origin, candidate = "usual", draw_ordinary(target, bench.start, rng)
        elif chance < 0.5 and result.worst:
            archive = result.worst if chance < 0.2 else result.promising
            _, _, parent = archive[int(rng.integers(len(archive)))]
            origin, candidate = "mutated", mutate_candidate(target, parent, rng)
        elif chance < 0.53 and target.optimise:
            candidate = optimise_candidate(target, bench.model, bench.start, rng)
            origin = "optimised"
        else:
            origin, candidate = "drawn", draw_candidate(target, bench.start, rng)
        before = result.ratio
        try:
            ratio = bench.measure(candidate, result, repeat=turn % _REPEAT_EVERY == 0)
        except UnsupportedModelError:
            raise
        except BaseException as error:
            reraise_stop(error)
            result.raised = result.raised or _describe_error(error)
            ratio = 0.0
        turn += 1
        result.isolation = bench.clipper.isolation
        result.candidates += candidate.num_batches
        example = candidate.batch[0][:1], candidate.batch[1][:1]
        result.keep(ratio, bench.slack.measure(example, bench.clip_norm), candidate)
        if result.ratio > before:
            result.origin = f"{origin}, C = {bench.clip_norm:g}"
        progress(candidate.num_batches)


class _Bench:
    """A model and its clipper, made ready for one clip norm."""

    def __init__(
        self,
        target: TargetModel,
        clip_norm: float,
        dtype: torch.dtype,
        make_clipper: MakeClipper,
    ) -> None:
        self.clip_norm = clip_norm
        self.model = target.make().to(dtype)
        self.start = [entry.clone() for entry in float_entries(self.model)]
        self.slack = RoundingSlack(self.model, target.loss)
        self.clipper = make_clipper(self.model, target.loss, clip_norm, target.clipping)

    def measure(
        self, candidate: Candidate, result: SearchResult, repeat: bool
    ) -> float:
        """Measure a candidate, note what is worst, and return the worst ratio.

        `repeat`: check as well that a call does not depend on the calls before.
        """
        load_entries(self.model, candidate.weights)
        sent = [entry.clone() for entry in float_entries(self.model)]
        whole = self._sum(candidate, candidate.batch, candidate.usable)
        other = self._sum(candidate, *candidate.replace_firsts())
        replaced = max(distance_ratios(whole, other, 2 * self.clip_norm))
        result.replaced = max(result.replaced, replaced)
        other = self._sum(candidate, *candidate.remove_firsts())
        removed = max(distance_ratios(whole, other, self.clip_norm))
        result.removed = max(result.removed, removed)
        if not repeat:
            return max(removed, replaced)
        again = self._sum(candidate, candidate.batch, candidate.usable)
        remembered = max(distance_ratios(whole, again, 2 * self.clip_norm))
        pairs = zip(float_entries(self.model), sent, strict=True)
        if not all(torch.equal(*map(torch.nan_to_num, pair)) for pair in pairs):
            remembered = math.inf  # the model is not what the server sent
        result.remembered = max(result.remembered, remembered)
        return max(removed, replaced, 1.0 + remembered if remembered else 0.0)

    def _sum(
        self, candidate: Candidate, batch: Batch, usable: torch.Tensor
    ) -> torch.Tensor:
        torch.manual_seed(candidate.seed)  # the same dropout for the same places
        *examples, counted = candidate.read(batch, usable)
        # Clippers may reuse the memory of what they return in the next call.
        return self.clipper.consume_batch(
            (examples[0], examples[1]), candidate.num_batches, counted
        ).clone()


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"

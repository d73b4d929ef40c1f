"""Search for the example that moves a clipped sum the most.

The promise under test: whatever the weights and the examples are, in the sums that
`ClippedGradients` returns

- removing one example (its place stays, empty) changes a sum by at most C; for an
  example alone this is the norm of its contribution;
- replacing one example by another changes a sum by at most 2C;
- both hold for a person with K places, whatever the numbers of their examples are;
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
from functools import partial
from typing import Protocol

import numpy as np
import torch

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
    UnsupportedModelError,
)
from flwr_safedshb.stop_signal import reraise_stop

CLIP_NORMS = (1.0, 0.1, 1000.0)
# How many of the worst candidates are kept, to mutate.
_ARCHIVE_SIZE = 12
# One in so many candidates is also checked for a call that depends on earlier calls.
_REPEAT_EVERY = 8


class Clipper(Protocol):
    """The interface of the attacked sum; `ClippedGradients` implements it."""

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
# Of model, loss, clip norm and clipping; for persons also of per_owner.
MakeClipper = Callable[..., Clipper]


class Float32Sums(ClippedGradients):
    """`ClippedGradients` that sums small models in float32, too, like large ones."""

    max_float64_size = 0


@dataclass
class SearchResult:
    """The result of a sensitivity search.

    Attributes
    ----------
    isolation : str
        How examples were kept apart, or empty if the model was refused.
    refusal : str
        The first line of the refusal, or empty.
    removal_ratio, replacement_ratio : float
        The largest change of a sum by removing one example, in units of C, and by
        replacing one, in units of 2C; infinite if a sum is not finite.
    memory_ratio : float
        The largest change of a sum by an earlier call, in units of 2C.
    origin : str
        How the worst candidate was made.
    candidates : int
        How many were measured.
    raised : str
        The first exception that was not a refusal, or empty: whether a node answers
        must not depend on its data.
    accepted : str
        Set if a model was accepted that must be refused.
    worst, promising : list of (score, -number, Candidate)
        The candidates with the largest change of a sum, and with the most rounding
        slack.
    """

    isolation: str = ""
    refusal: str = ""
    removal_ratio: float = 0.0
    replacement_ratio: float = 0.0
    memory_ratio: float = 0.0
    origin: str = ""
    candidates: int = 0
    raised: str = ""
    accepted: str = ""
    worst: Archive = field(default_factory=list, repr=False)
    promising: Archive = field(default_factory=list, repr=False)

    @property
    def ratio(self) -> float:
        """The worst ratio; above 1 the promise is broken."""
        found = max(self.removal_ratio, self.replacement_ratio)
        # Any influence of an earlier call breaks the promise.
        return max(found, 1.0 + self.memory_ratio) if self.memory_ratio else found

    @property
    def broken(self) -> str:
        """The promise that does not hold, or empty."""
        if self.ratio > 1.0:
            memory = (
                ", and a call depends on an earlier one" if self.memory_ratio else ""
            )
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
                continue  # skip near duplicates
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
    """Search for a candidate that breaks the sensitivity bound of one model.

    Parameters
    ----------
    target : TargetModel
    candidates : int
        The least number of candidates to try.
    seed : int
        The same seed makes the same candidates.
    dtype : torch.dtype
        Of the weights and of floating-point inputs.
    make_clipper : callable (model, loss, clip_norm, clipping) -> Clipper
        By default `ClippedGradients`, and for half of the candidates `Float32Sums`.
    progress : callable
        Called with the number of candidates done since the last call.
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
    """A model and its clipper for one clip norm."""

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
        if target.per_owner > 1:
            make_clipper = partial(make_clipper, per_owner=target.per_owner)
        self.clipper = make_clipper(self.model, target.loss, clip_norm, target.clipping)

    def measure(
        self, candidate: Candidate, result: SearchResult, repeat: bool
    ) -> float:
        """Measure a candidate, update `result`, and return the candidate's worst ratio.

        With `repeat`, also check that a call does not depend on earlier calls.
        """
        load_entries(self.model, candidate.weights)
        sent = [entry.clone() for entry in float_entries(self.model)]
        whole = self._sum(candidate, candidate.batch, candidate.usable)
        other = self._sum(candidate, *candidate.replace_firsts())
        replacement = max(distance_ratios(whole, other, 2 * self.clip_norm))
        result.replacement_ratio = max(result.replacement_ratio, replacement)
        other = self._sum(candidate, *candidate.remove_firsts())
        removal = max(distance_ratios(whole, other, self.clip_norm))
        result.removal_ratio = max(result.removal_ratio, removal)
        if not repeat:
            return max(removal, replacement)
        again = self._sum(candidate, candidate.batch, candidate.usable)
        memory = max(distance_ratios(whole, again, 2 * self.clip_norm))
        pairs = zip(float_entries(self.model), sent, strict=True)
        if not all(torch.equal(*map(torch.nan_to_num, pair)) for pair in pairs):
            memory = math.inf  # the model is not what the server sent
        result.memory_ratio = max(result.memory_ratio, memory)
        return max(removal, replacement, 1.0 + memory if memory else 0.0)

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

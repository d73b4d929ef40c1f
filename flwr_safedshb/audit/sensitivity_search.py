"""The search for the example that moves a clipped sum the most.

The promise under test: whatever the weights and the examples are, in the sums that
`ClippedGradients` returns

- leaving one example's place empty changes a sum by at most C; of an example alone this
  is the norm of its contribution;
- replacing one example by another changes a sum by at most 2C;
- no call depends on what an earlier call was given, or changes the model;
- a model that keeps values of examples is refused.

A clipper is called as a client calls it: with a batch read from arrays or items, some
of which cannot be read, and the places that count. Models are in training mode, and all
passes of a candidate have the same random state.

Candidates are drawn from families of hostile numbers, mutated from the worst ones found
so far, and driven by an optimiser to where gradients cancel (`driven`). Several that
share their weights are measured at once.
"""

from __future__ import annotations

import heapq
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import nn

from flwr_safedshb.audit.candidate import Trial, drawn, entries, mutated, usual
from flwr_safedshb.audit.exact_norms import gaps
from flwr_safedshb.audit.gradient_search import cancelled
from flwr_safedshb.audit.reading import read_batch
from flwr_safedshb.audit.rounding_slack import Hidden
from flwr_safedshb.audit.target_model import Batch, Subject
from flwr_safedshb.privacy.bad_examples import silence_log
from flwr_safedshb.privacy.batches import Example
from flwr_safedshb.privacy.clipping.gradients import (
    ClippedGradients,
    Loss,
    UnsupportedModelError,
)
from flwr_safedshb.privacy.plan import Clipping
from flwr_safedshb.stop_signal import reraise_stop

# The worst candidates so far, from which others are made.
_ARCHIVE = 12
# One time in so many it is asked whether a call remembers the one before.
_REMEMBER = 8
CLIPS = (1.0, 0.1, 1000.0)


class Clipper(Protocol):
    """What is under attack; `ClippedGradients` is one."""

    def consume_batch(
        self, batch: Example, groups: int = 1, usable: torch.Tensor | None = None, /
    ) -> torch.Tensor:
        """Return the sum of each group's clipped gradients, (groups, d)."""
        ...


Kept = list[tuple[float, int, Trial]]  # by a score, the least first
MakeClipper = Callable[[nn.Module, Loss, float, Clipping], Clipper]


class Narrow(ClippedGradients):
    """Sums small models in float32, as large ones are summed."""

    max_float64_size = 0


@dataclass
class Finding:
    """The worst that a search found.

    Attributes
    ----------
    subject, dtype : str
    path : str
        How the sums were made, or empty if the model was refused.
    refusal : str
        The first line of why, or empty.
    removed, replaced : float
        The largest changes found, in units of C and 2C; infinite for values that are
        not finite.
    remembered : float
        The largest change of a sum by what an earlier call was given, in units of 2C.
    how : str
        Of the worst candidate: how it was made.
    candidates : int
        Candidates measured.
    raised : str
        The first exception that was no refusal, or empty: whether a node answers must
        not depend on its data.
    accepted : str
        What was accepted and must be refused, or empty.
    seconds : float
    """

    subject: str
    dtype: str
    path: str = ""
    refusal: str = ""
    removed: float = 0.0
    replaced: float = 0.0
    remembered: float = 0.0
    how: str = ""
    candidates: int = 0
    raised: str = ""
    accepted: str = ""
    seconds: float = 0.0
    worst: Kept = field(default_factory=list, repr=False)
    promising: Kept = field(default_factory=list, repr=False)

    @property
    def ratio(self) -> float:
        """The worst ratio; above 1 the promise is broken."""
        found = max(self.removed, self.replaced)
        # An example that has had its say must not have another one.
        return max(found, 1.0 + self.remembered) if self.remembered else found

    @property
    def holds(self) -> bool:
        """Whether the model was refused, or nothing above the bounds was found."""
        return self.ratio <= 1.0 and not self.raised and not self.accepted

    def keep(self, score: float, hidden: float, trial: Trial) -> None:
        """Keep candidates if they are among the worst, or hide the most."""
        for kept, value in ((self.worst, score), (self.promising, hidden)):
            if any(math.isclose(value, old, rel_tol=1e-3) for old, _, _ in kept):
                continue  # one of a kind is enough to start from
            entry = (value, -self.candidates, trial)
            if len(kept) < _ARCHIVE:
                heapq.heappush(kept, entry)
            elif entry > kept[0]:
                heapq.heapreplace(kept, entry)


def search(
    subject: Subject,
    candidates: int,
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    make_clipper: MakeClipper | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> Finding:
    """Attack one model with at least so many candidates.

    Parameters
    ----------
    subject : Subject
    candidates : int
    seed : int
        The same seed makes the same candidates.
    dtype : torch.dtype
        Of the weights and of floating-point inputs.
    make_clipper : callable (model, loss, clip_norm, clipping) -> Clipper
        By default `ClippedGradients`, for half of the candidates with narrow sums.
    progress : callable
        Told now and then how many more are done.
    """
    finding = Finding(subject.name, str(dtype).removeprefix("torch."))
    rng = np.random.default_rng([seed, *finding.subject.encode()])
    start = time.monotonic()
    quiet = warnings.catch_warnings(action="ignore")
    with torch.random.fork_rng(devices=[]), quiet, silence_log():
        torch.manual_seed(seed)
        try:
            kinds = (make_clipper,) if make_clipper else (ClippedGradients, Narrow)
            benches = [
                _Bench(subject, clip, dtype, kind) for kind in kinds for clip in CLIPS
            ]
            _attack(subject, benches, finding, candidates, rng, progress)
        except UnsupportedModelError as refusal:
            finding.refusal = str(refusal).partition("\n")[0]
            finding.path = ""
        except BaseException as error:  # a node must not end either
            reraise_stop(error)
            finding.raised = _named(error)
    if subject.must_refuse and not finding.refusal:
        finding.accepted = "a model that must be refused is accepted"
    finding.seconds = time.monotonic() - start
    return finding


def _attack(
    subject: Subject,
    benches: Sequence[_Bench],
    finding: Finding,
    candidates: int,
    rng: np.random.Generator,
    progress: Callable[[int], None],
) -> None:
    turn = 0
    while finding.candidates < candidates:
        bench = benches[int(rng.integers(len(benches)))]
        chance = rng.random()
        if turn == 0:
            how, trial = "usual", usual(subject, bench.start, rng)
        elif chance < 0.5 and finding.worst:
            kept = finding.worst if chance < 0.2 else finding.promising
            _, _, parent = kept[int(rng.integers(len(kept)))]
            how, trial = "mutated", mutated(subject, parent, rng)
        elif chance < 0.53 and subject.driven:
            how, trial = "driven", cancelled(subject, bench.model, bench.start, rng)
        else:
            how, trial = "drawn", drawn(subject, bench.start, rng)
        before = finding.ratio
        try:
            score = bench.measure(trial, finding, again=turn % _REMEMBER == 0)
        except UnsupportedModelError:
            raise
        except BaseException as error:
            reraise_stop(error)
            finding.raised = finding.raised or _named(error)
            score = 0.0
        turn += 1
        finding.path = bench.path
        finding.candidates += trial.groups
        alone = trial.batch[0][:1], trial.batch[1][:1]
        finding.keep(score, bench.hidden(alone, bench.clip_norm), trial)
        if finding.ratio > before:
            finding.how = f"{how}, C = {bench.clip_norm:g}"
        progress(trial.groups)


class _Bench:
    """A model made ready for one clip."""

    def __init__(
        self,
        subject: Subject,
        clip_norm: float,
        dtype: torch.dtype,
        make_clipper: MakeClipper,
    ) -> None:
        self.clip_norm = clip_norm
        self.model = subject.make().to(dtype)
        self._entries = entries(self.model)
        self.start = [entry.clone() for entry in self._entries]
        self.hidden = Hidden(self.model, subject.loss)
        self._clipper = make_clipper(
            self.model, subject.loss, clip_norm, subject.clipping
        )

    @property
    def path(self) -> str:
        """How the sums are made."""
        return str(getattr(self._clipper, "path", type(self._clipper).__name__))

    def measure(self, trial: Trial, finding: Finding, again: bool) -> float:
        """Measure candidates, note what is worst, and return the worst ratio.

        `again`: ask as well whether a call depends on the calls before.
        """
        for mine, given in zip(self._entries, trial.weights, strict=True):
            mine.copy_(given)
        sent = [entry.clone() for entry in self._entries]
        whole = self._sums(trial, trial.batch, trial.usable)
        exchanged = self._sums(trial, *trial.exchanged)
        replaced = max(gaps(whole, exchanged, 2 * self.clip_norm))
        finding.replaced = max(finding.replaced, replaced)
        emptied = self._sums(trial, *trial.emptied)
        removed = max(gaps(whole, emptied, self.clip_norm))
        finding.removed = max(finding.removed, removed)
        if not again:
            return max(removed, replaced)
        same = self._sums(trial, trial.batch, trial.usable)
        remembered = max(gaps(whole, same, 2 * self.clip_norm))
        pairs = zip(self._entries, sent, strict=True)
        if not all(torch.equal(*map(torch.nan_to_num, pair)) for pair in pairs):
            remembered = math.inf  # the model is not what the server sent
        finding.remembered = max(finding.remembered, remembered)
        return max(removed, replaced, 1.0 + remembered if remembered else 0.0)

    def _sums(self, trial: Trial, batch: Batch, usable: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(trial.seed)  # the same dropout for the same places
        *read, counted = read_batch(trial.form, batch, usable)
        # Clippers may give back memory that the next call writes to.
        return self._clipper.consume_batch(
            (read[0], read[1]), trial.groups, counted
        ).clone()


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def worst_trials(finding: Finding) -> list[Trial]:
    """Return the worst candidates of a search, the worst first."""
    return [trial for _, _, trial in sorted(finding.worst, reverse=True)]

"""The hostile suite: every model of the zoo, every odd plan, message and example."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from flwr_safedshb.audit.label_inference import read_labels
from flwr_safedshb.audit.messages import send_odd_messages
from flwr_safedshb.audit.odd_plans import attack_limits, attack_plans
from flwr_safedshb.audit.orders import attack_orders
from flwr_safedshb.audit.report import (
    CasesRow,
    ModelRow,
    Settings,
    cases_row,
    model_row,
)
from flwr_safedshb.audit.sensitivity_search import search, worst_trials
from flwr_safedshb.audit.target_model import Subject
from flwr_safedshb.audit.transcripts import compare_transcripts
from flwr_safedshb.audit.zoo import mixing, partial, plain, random, state
from flwr_safedshb.audit.zoo import pretrained as borrowed


@dataclass(frozen=True)
class Attempt:
    """One search: a model, and the type of its weights."""

    subject: Subject
    dtype: torch.dtype

    @property
    def names(self) -> tuple[str, str]:
        """The model's name and that of the type."""
        return self.subject.name, str(self.dtype).removeprefix("torch.")

    def run(self, settings: Settings, progress: Callable[[int], None]) -> ModelRow:
        """Search, and then try to read labels with the worst that was found."""
        subject = self.subject
        finding = search(
            subject,
            settings.candidates,
            settings.seed,
            dtype=self.dtype,
            progress=progress,
        )
        reading = None
        if finding.path and not finding.raised:
            trials = worst_trials(finding)
            reading = read_labels(subject, trials, settings.guesses, settings.seed)
        return model_row(finding, reading)


def attempts(only: Sequence[str] = ()) -> tuple[list[Attempt], list[str]]:
    """Return the models to attack, and why others are left out.

    Parameters
    ----------
    only : sequence of str
        Parts of names; none for all.

    Raises
    ------
    ValueError
        If a part is in no name.
    """
    rooms = (plain, borrowed, random, partial, mixing, state)
    subjects = [subject for room in rooms for subject in room.SUBJECTS]
    for part in only:
        if not any(part.lower() in subject.name.lower() for subject in subjects):
            names = ", ".join(subject.name for subject in subjects)
            raise ValueError(f"only={part!r} names no model; there are {names}")
    chosen = [
        subject
        for subject in subjects
        if not only or any(part.lower() in subject.name.lower() for part in only)
    ]
    missing = borrowed.missing()
    absent = [s for s in chosen if missing and s in borrowed.SUBJECTS]
    left_out = [f"{s.name}: {', '.join(missing)} not installed" for s in absent]
    found = [
        Attempt(subject, dtype)
        for subject in chosen
        if subject not in absent
        for dtype in subject.dtypes
    ]
    return found, left_out


def attack_node(settings: Settings) -> Iterator[CasesRow]:
    """Ask a node and a ledger for everything odd."""
    yield cases_row(send_odd_messages())
    yield cases_row(compare_transcripts(settings.rounds))
    yield cases_row(attack_limits())
    yield cases_row(attack_plans())
    yield cases_row(attack_orders())

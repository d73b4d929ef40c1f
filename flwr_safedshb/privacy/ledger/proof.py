"""A charge as a node shows it to others: its place in the ledger, and what it cost.

An entry of a ledger depends on no example: it has a number, a time, the name of a run,
a plan and a number of steps. A plan may name a part of the data by a digest, which is
keyed with a secret of the node (`algorithm.split`), and so looks random to others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import cast, get_args

from flwr_safedshb.privacy.accounting.ranges import (
    DELTA,
    EPSILON,
    MAX_STEPS,
    check_steps,
)
from flwr_safedshb.privacy.ledger.history import Totals
from flwr_safedshb.privacy.ledger.ledger_file import (
    convert_to_unit,
    hash_entry,
    hash_limits,
    parse_plan,
)
from flwr_safedshb.privacy.plan import PrivacyPlan, PrivacyUnit

# Plans as JSON, and the steps of each.
Steps = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class ChargeProof:
    """The newest charge of a run in a ledger, with what the run has cost so far.

    Attributes
    ----------
    before, head : str
        The hash of the entry before it and its own, in hexadecimal: the chain.
    entry : tuple
        Its number, time, run, kind, plan (as JSON) and steps.
    max_epsilon, delta : float
        The limits that the ledger was made with.
    unit : str
    first : tuple of (str, int)
        What the run was committed to, or its first charge, in the ledger's unit.
    charged : tuple of (str, int)
        All that the run was charged for, in the ledger's unit.
    epsilon : float
        Of the run alone, as the node states it.
    """

    before: str
    entry: tuple[object, ...]
    head: str
    max_epsilon: float
    delta: float
    unit: str
    first: Steps
    charged: Steps
    epsilon: float

    @property
    def number(self) -> int:
        """The number of the entry in the ledger, from 1 on."""
        return cast(int, self.entry[0])

    @property
    def run(self) -> str:
        """The name of the run."""
        return cast(str, self.entry[2])

    @property
    def plan(self) -> PrivacyPlan:
        """The plan that was charged."""
        return parse_plan(cast(str, self.entry[4]))

    @property
    def steps(self) -> int:
        """The steps that were charged."""
        return cast(int, self.entry[5])

    def to_dict(self) -> dict[str, object]:
        """Return the proof as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> ChargeProof:
        """Return the proof that somebody else made, its types and ranges checked.

        Raises
        ------
        LookupError, TypeError, ValueError
        """
        if set(values) != {field.name for field in fields(cls)}:
            raise ValueError(f"a proof of a charge has other fields: {sorted(values)}")
        given = dict(values)
        entry = tuple(cast(list[object], given["entry"]))
        kinds = (int, str, str, str, str, int)
        if [type(value) for value in entry] != [*kinds] or entry[3] != "charge":
            raise ValueError("the entry is no charge")
        proof = cls(
            entry=entry,
            first=_parse_steps(given.pop("first")),
            charged=_parse_steps(given.pop("charged")),
            **{k: v for k, v in given.items() if k != "entry"},  # type: ignore[arg-type]
        )
        for name in (proof.before, proof.head):
            bytes.fromhex(name)
        EPSILON.check("max_epsilon", proof.max_epsilon)
        DELTA.check("delta", proof.delta)
        check_steps(proof.steps)
        if proof.unit not in get_args(PrivacyUnit) or not proof.epsilon >= 0.0:
            raise ValueError(f"unit={proof.unit!r}, epsilon={proof.epsilon!r}")
        proof.plan.convert_to_unit(cast(PrivacyUnit, proof.unit))
        return proof

    def totals(self) -> tuple[Totals, Totals]:
        """Return the first block and all charges of the run."""
        return (
            {parse_plan(text): steps for text, steps in self.first},
            {parse_plan(text): steps for text, steps in self.charged},
        )

    def compute_epsilon(self) -> float:
        """Return the epsilon of the run alone, from its plans and steps."""
        # Here, because clients import this module, and accountants are slow to import.
        from flwr_safedshb.privacy.ledger.admission import AdmissionRule

        first, charged = self.totals()
        limits = self.delta, self.max_epsilon, self.max_epsilon
        unit = cast(PrivacyUnit, self.unit)
        rule = AdmissionRule(tuple(first.items()), *limits, unit)
        return rule.state_epsilon(charged).epsilon

    def find_problems(self, before: ChargeProof | None) -> list[str]:
        """Return what is wrong with the proof, alone and after an earlier one.

        Parameters
        ----------
        before : ChargeProof or None
            An earlier proof by the same ledger for the same run.
        """
        found = []
        if hash_entry(bytes.fromhex(self.before), self.entry).hex() != self.head:
            found.append("the hash of its ledger entry is wrong")
        genesis = hash_limits(self.max_epsilon, self.delta, self.unit).hex()
        if self.number < 1 or (self.number == 1 and self.before != genesis):
            found.append("its ledger does not begin with its limits")
        own = convert_to_unit(self.plan, cast(PrivacyUnit, self.unit))
        first, charged = self.totals()
        if charged.get(own, 0) < self.steps:
            found.append("its totals lack the charge")
        if before is None:
            return found
        if self._limits() != before._limits():
            found.append("its ledger has other limits than before")
        if self.number <= before.number:
            found.append("its ledger was rolled back")
        elif self.number == before.number + 1 and self.before != before.head:
            found.append("its ledger does not continue the one before")
        first_before, charged_before = before.totals()
        least = dict(charged_before)
        least[own] = least.get(own, 0) + self.steps
        if first != first_before:
            found.append("it was committed to other steps before")
        if any(charged.get(plan, 0) < steps for plan, steps in least.items()):
            found.append("a charge is missing from its totals")
        return found

    def _limits(self) -> tuple[float, float, str]:
        return self.max_epsilon, self.delta, self.unit


def _parse_steps(values: object) -> Steps:
    found = tuple((text, steps) for text, steps in cast(list[list[object]], values))
    for text, steps in found:
        parse_plan(cast(str, text))
        if type(steps) is not int or not 0 <= steps <= MAX_STEPS:
            raise ValueError(f"steps={steps!r:.40}")
    return cast(Steps, found)

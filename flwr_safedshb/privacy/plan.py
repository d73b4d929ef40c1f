"""A privacy plan: sampler, clip, noise and adjacency, frozen with their accountant.

The mechanism is one step of Algorithm 1 of Allouah, Guerraoui, Gupta, Pinot, Stephan:
"On the Privacy-Robustness-Utility Trilemma in Distributed Learning", ICML 2023. A plan
holds everything that its epsilon depends on; nothing else in the project states one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from numbers import Integral, Real
from typing import Literal, get_args

from flwr_safedshb.privacy.accounting import ranges
from flwr_safedshb.privacy.samplers import Adjacency as Adjacency
from flwr_safedshb.privacy.samplers import Sampler, get_sampler

# The name of a sampler; `load_samplers` has them all.
Sampling = str
Clipping = Literal["per-example", "ghost"]
Unit = Literal["example", "person"]
# What neighbouring datasets differ in. The first two are about one example; "person" is
# replace-one of a person with all of their examples.
PrivacyUnit = Literal["replace-one", "add-remove", "person", "person-add-remove"]
# Of plans that say nothing else, such as those of older ledgers.
_USUAL = {"part": "all", "unit": "example"}
# The part that is all examples; and what parts are called.
ALL = "all"
_PART = re.compile(rf"{ALL}|(trained|held-out):[0-9a-f]{{16}}")


@dataclass(frozen=True)
class PrivacyStatement:
    """An epsilon together with everything it depends on.

    Attributes
    ----------
    epsilon, delta : float
        The (epsilon, delta)-differential privacy that is stated.
    steps : int
        Releases it covers (T).
    sampler, adjacency, accountant : str
        The mechanism and the unit of privacy it holds for, and how it was computed.
    unit : {"example", "person"}
        Whom it is for: one example, or one person with all of theirs.
    """

    epsilon: float
    delta: float
    steps: int
    sampler: str
    adjacency: str
    accountant: str
    unit: Unit = "example"

    def __str__(self) -> str:
        return (
            f"epsilon = {self.epsilon:.5g} at delta = {self.delta:g} after "
            f"{self.steps} steps for {describe_unit(self.unit)} ({self.sampler}, "
            f"{self.adjacency} adjacency, {self.accountant})"
        )


@dataclass(frozen=True)
class PrivacyPlan:
    """How a client makes its gradient private in every step, and the cost of that.

    Each step draws a batch, clips every example's gradient to ``clip_norm``, sums,
    divides by ``batch_size`` and adds N(0, ``noise_std``^2) to every coordinate.

    Attributes
    ----------
    clip_norm : float
        C, the largest L2 norm of one example's gradient; in [1e-9, 1e9].
    noise_multiplier : float
        Noise deviation in units of 2C/b, the replace-one sensitivity of the fixed-size
        batch mean, whatever the sampler and the adjacency; in [1e-6, 1e6], or 0 for no
        privacy.
    batch_size : int
        b. Under ``poisson`` the expected size; the divisor is b in any case.
    num_examples : int
        m, the examples this client holds; treated as public.
    sampling : str
        The name of a sampler: "fixed" for b of m without replacement, fresh each step;
        "poisson" for each example with probability b/m, independently.
    adjacency : {"replace-one", "add-remove"}
        The unit of privacy that epsilon is stated for.
    clipping : {"per-example", "ghost"}
        How the same clipped sum is computed; epsilon does not depend on it.
    unit : {"example", "person"}
        Whom epsilon is stated for: one example, or one person with all of theirs. With
        "person", whatever is said here of examples holds for persons: m persons, b of
        them in a batch, and the mean gradient of a person's examples is clipped.
    part : str
        Which of the node's examples it is for: all, or one of the two parts of a split
        of them, ``trained:<digest>`` and ``held-out:<digest>``. No example is in both,
        so that each pays for one of them alone. Clients set it, and no app.
    """

    clip_norm: float
    noise_multiplier: float
    batch_size: int
    num_examples: int
    sampling: Sampling = "fixed"
    adjacency: Adjacency = "replace-one"
    clipping: Clipping = "per-example"
    part: str = ALL
    unit: Unit = "example"

    def __post_init__(self) -> None:
        self._set("clip_norm", ranges.CLIP_NORM.check("clip_norm", self.clip_norm))
        noise = self.noise_multiplier
        if isinstance(noise, bool) or not isinstance(noise, Real) or noise != 0:
            noise = ranges.NOISE_MULTIPLIER.check("noise_multiplier", noise)
        # -0.0 becomes 0.0: a ledger must not take them for two plans.
        self._set("noise_multiplier", float(noise) + 0.0)
        for name in ("batch_size", "num_examples"):
            self._set(name, _check_count(name, getattr(self, name)))
        if self.num_examples < self.batch_size:
            raise ValueError(
                f"batch_size={self.batch_size} needs at least as many examples, got "
                f"num_examples={self.num_examples}; lower it or add examples"
            )
        for name, words in (
            ("adjacency", get_args(Adjacency)),
            ("clipping", get_args(Clipping)),
            ("unit", get_args(Unit)),
        ):
            if getattr(self, name) not in words:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is unknown; use one of "
                    + ", ".join(map(repr, words))
                )
        if not isinstance(self.part, str) or not _PART.fullmatch(self.part):
            raise ValueError(f"part={self.part!r:.60} must be {ALL!r}, or of a split")
        self.sampler.check(self)

    def _set(self, name: str, value: float) -> None:
        object.__setattr__(self, name, value)

    @cached_property
    def noise_std(self) -> float:
        """sigma_DP = 2 C s / b, the deviation added to every coordinate of the mean."""
        return 2.0 * self.clip_norm * self.noise_multiplier / self.batch_size

    @cached_property
    def sampler(self) -> Sampler:
        """How batches are drawn, and what one step reveals."""
        return get_sampler(self.sampling)

    @cached_property
    def sampling_rate(self) -> float:
        """Q = b / m, the probability that a given example is in a batch."""
        return self.batch_size / self.num_examples

    @property
    def privacy_unit(self) -> PrivacyUnit:
        """What neighbouring datasets differ in."""
        return join_unit(self.unit, self.adjacency)

    def convert_to_unit(self, unit: PrivacyUnit) -> PrivacyPlan:
        """Return one plan for all that cost the same, accounted in a unit of privacy.

        The adjacency only names the unit: the mechanism stays. Neither the clip nor how
        it is computed changes the cost.

        Raises
        ------
        ValueError
            If the sampler has no accountant for the unit, or if it is about persons and
            the plan about examples, or the other way round.
        """
        owner, adjacency = split_unit(unit)
        if self.unit != owner:
            raise ValueError(
                f"the plan is for one {self.unit}, and {unit!r} is about one {owner}; "
                "the node's owner decides which, by the rule unit of a new ledger for "
                "data that no run has seen"
            )
        return replace(self, clip_norm=1.0, clipping="per-example", adjacency=adjacency)

    def epsilon(self, steps: int, delta: float, group: int = 1) -> float:
        """Return epsilon of ``steps`` releases (T); infinite without noise.

        With ``group`` it is for as many examples at once, such as all that one person
        may have: an upper bound where the unit is not the person.
        """
        from flwr_safedshb.privacy.accounting import accountant

        if group != 1:
            return accountant.compute_group_epsilon(self, steps, delta, group)
        return accountant.compute_epsilon([(self, steps)], delta)

    def statement(self, steps: int, delta: float) -> PrivacyStatement:
        """State epsilon of ``steps`` releases with the mechanism it is true for."""
        from flwr_safedshb.privacy.accounting import accountant

        return accountant.state_epsilon([(self, steps)], delta)

    @classmethod
    def calibrate(
        cls,
        target_epsilon: float,
        delta: float,
        steps: int,
        *,
        clip_norm: float,
        batch_size: int,
        num_examples: int,
        sampling: Sampling = "fixed",
        adjacency: Adjacency = "replace-one",
        clipping: Clipping = "per-example",
        unit: Unit = "example",
        beside: Sequence[tuple[PrivacyPlan, int]] = (),
    ) -> PrivacyPlan:
        """Make the plan with the least noise that keeps ``steps`` within the target.

        ``beside`` holds plans and steps of other releases of the same examples, such as
        evaluations: all of it together keeps within the target.

        Returns
        -------
        PrivacyPlan
            Its accounted epsilon is at most ``target_epsilon`` and within 1% of it.
        """
        from flwr_safedshb.privacy.accounting import calibration

        shape = cls(
            clip_norm=clip_norm,
            noise_multiplier=1.0,
            batch_size=batch_size,
            num_examples=num_examples,
            sampling=sampling,
            adjacency=adjacency,
            clipping=clipping,
            unit=unit,
        )
        return calibration.calibrate(shape, target_epsilon, delta, steps, tuple(beside))

    def to_dict(self) -> dict[str, float | int | str]:
        """Return the fields as plain values; `part` and `unit` only if unusual."""
        values = asdict(self)
        return {k: v for k, v in values.items() if (k, v) not in _USUAL.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> PrivacyPlan:
        """Rebuild a plan from :meth:`to_dict`; every field must be there, no other."""
        expected = {field.name for field in fields(cls)} - set(_USUAL)
        if set(values) - set(_USUAL) != expected:
            raise ValueError(
                f"a plan has the fields {sorted(expected)}, got {sorted(values)}"
            )
        return cls(**values)  # type: ignore[arg-type]  # checked by __post_init__

    def to_json(self) -> str:
        """Return one canonical line of JSON: equal plans give equal text."""
        return json.dumps(self.to_dict(), sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> PrivacyPlan:
        """Rebuild the identical plan from :meth:`to_json`."""
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError("a plan is a JSON object, got another kind of value")
        return cls.from_dict(values)


def join_unit(owner: Unit, adjacency: Adjacency) -> PrivacyUnit:
    """Return the unit of privacy of an example's or a person's adjacency."""
    if owner == "example":
        return adjacency
    return "person" if adjacency == "replace-one" else "person-add-remove"


def split_unit(unit: PrivacyUnit) -> tuple[Unit, Adjacency]:
    """Return whom a unit of privacy is about, and the adjacency."""
    adjacency: Adjacency = "add-remove" if "add-remove" in unit else "replace-one"
    return "person" if unit.startswith("person") else "example", adjacency


def describe_unit(unit: Unit) -> str:
    """Return whom an epsilon is for, in words."""
    return "a person" if unit == "person" else "one example"


def _check_count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name}={value!r} must be an integer")
    if not 1 <= int(value) <= ranges.MAX_EXAMPLES:
        raise ValueError(
            f"{name}={ranges.shorten_value(value)} must lie in "
            f"[1, {ranges.MAX_EXAMPLES}]"
        )
    return int(value)

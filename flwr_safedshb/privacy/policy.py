"""A node's policy: the least privacy that its owner accepts, whatever a run asks for.

The owner writes the rules into the node's own configuration, which no message can
change; a run that asks for less privacy is refused before any data are touched.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Self, get_args

from flwr_safedshb.privacy.accounting import ranges
from flwr_safedshb.privacy.plan import (
    Adjacency,
    PrivacyPlan,
    PrivacyUnit,
    split_unit,
)
from flwr_safedshb.privacy.samplers import load_samplers

Value = bool | int | float | str


class PolicyViolation(ValueError):  # noqa: N818  # what happened, as in BudgetExhausted
    """The run asks for less than the node's policy demands."""


@dataclass(frozen=True)
class NodePolicy:
    """The rules of one node; a rule that is None does not bind.

    In the node's configuration the rules have the same names with hyphens:
    ``max-epsilon=2.0 delta=1e-5 min-noise-multiplier=1.0 sampling=fixed``.

    Attributes
    ----------
    max_epsilon : float, optional
        The largest budget that a run may ask for.
    delta : float, optional
        The largest delta that a run may state its epsilon for.
    min_noise_multiplier : float, optional
        The least noise, in units of 2C/b.
    max_clip_norm : float, optional
        The largest clip (C).
    max_sampling_rate : float, optional
        The largest share of the examples in a batch (b/m).
    sampling, adjacency : str, optional
        The words a plan may use, separated by commas.
    unit : {"replace-one", "add-remove", "person", "person-add-remove"}, optional
        The unit of privacy of the node's ledger, fixed when it is made; replace-one
        unless it is named. Plans are accounted in it, whatever adjacency they name.
        With the last two it is a person with all of their examples, and plans for
        single examples are refused; with the others, plans for persons are.
    require_secure_noise : bool, optional
        Whether noise that can be repeated from a seed is refused. A node that keeps a
        ledger refuses it unless this is False.
    """

    max_epsilon: float | None = None
    delta: float | None = None
    min_noise_multiplier: float | None = None
    max_clip_norm: float | None = None
    max_sampling_rate: float | None = None
    sampling: str | None = None
    adjacency: str | None = None
    unit: PrivacyUnit | None = None
    require_secure_noise: bool | None = None

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if value is not None:
                number = limit.range.check(_write_key(name), _parse_number(value))
                object.__setattr__(self, name, number)
        for name, words in _WORDS.items():
            value = getattr(self, name)
            if value is not None and not _split_words(value) <= words:
                raise ValueError(
                    f"{_write_key(name)}={value!r} must be words out of "
                    f"{', '.join(sorted(words))}, separated by commas"
                )
        if self.unit not in (None, *get_args(PrivacyUnit)):
            raise ValueError(
                f"unit={self.unit!r} must be one of {', '.join(get_args(PrivacyUnit))}"
            )
        if not isinstance(self.require_secure_noise, bool | None):
            raise ValueError(
                f"require-secure-noise={self.require_secure_noise!r} must be true or "
                "false"
            )

    @classmethod
    def from_config(
        cls, config: Mapping[str, Value], other_keys: Collection[str] = ()
    ) -> Self:
        """Read the policy out of a node's configuration.

        Parameters
        ----------
        config : mapping of str to bool, int, float or str
            Rules, by their names with hyphens.
        other_keys : collection of str
            Keys that may stand beside the rules. Any other key is an error: if it were
            skipped, a misspelt rule would silently not be enforced.
        """
        rules = {_write_key(field.name): field.name for field in fields(cls)}
        unknown = sorted(set(config) - set(rules) - set(other_keys))
        if unknown:
            known = [*rules, *other_keys]
            near = difflib.get_close_matches(unknown[0], known, n=1)
            raise ValueError(
                f"the node's configuration has the unknown key {unknown[0]!r}; "
                + (f"did you mean {near[0]!r}? " if near else "")
                + "a key of the app's own must be named in node_keys of the client; "
                + f"known are the rules {', '.join(rules)}"
            )
        given = {rules[key]: value for key, value in config.items() if key in rules}
        return cls(**given)  # type: ignore[arg-type]  # checked by __post_init__

    def check(
        self,
        plan: PrivacyPlan,
        *,
        max_epsilon: float | None = None,
        delta: float | None = None,
        secure_noise: bool = True,
    ) -> None:
        """Refuse a plan or a budget that is weaker than the policy.

        Parameters
        ----------
        plan : PrivacyPlan
            The run's, for every step.
        max_epsilon, delta : float, optional
            The budget that the run asks for, if it asks for one.
        secure_noise : bool
            Whether the noise is unpredictable (`Randomness.private`).

        Raises
        ------
        PolicyViolation
            Naming the first rule that is broken, its bound, and what was asked.
        ValueError
            If the budget that is asked for makes no sense under any policy.
        """
        budget = {"max_epsilon": max_epsilon, "delta": delta}
        for rule, limit in _LIMITS.items():
            asked = budget[rule] if limit.read is None else limit.read(plan)
            bound = getattr(self, rule)
            if (
                bound is not None
                and asked is not None
                and not limit.allows(asked, bound)
            ):
                raise _make_violation(rule, bound, asked)
        for rule in _WORDS:
            word, allowed = getattr(plan, rule), getattr(self, rule)
            if allowed is not None and word not in _split_words(allowed):
                raise _make_violation(rule, allowed, word)
        if self.unit is not None:
            owner, adjacency = split_unit(self.unit)
            if plan.unit != owner:
                raise _make_violation("unit", self.unit, f"a plan for one {plan.unit}")
            if adjacency not in plan.sampler.adjacencies:
                raise _make_violation("unit", self.unit, f"{plan.sampling} batches")
        if self.require_secure_noise and not secure_noise:
            raise _make_violation("require_secure_noise", "true", "noise from a seed")
        for name, number in budget.items():
            if number is not None:
                _LIMITS[name].range.check(name, number)


@dataclass(frozen=True)
class Limit:
    """A rule that is a number.

    Attributes
    ----------
    range : NumberRange
        The numbers that the rule may be set to.
    read : callable (PrivacyPlan) -> float, optional
        Returns the plan's number; None if the run's budget holds it.
    is_least : bool
        Whether the plan's number must be at least the rule's, and not at most.
    """

    range: ranges.NumberRange
    read: Callable[[PrivacyPlan], float] | None = None
    is_least: bool = False

    def allows(self, asked: float, bound: float) -> bool:
        """Return whether a plan's number meets a rule; NaN meets none."""
        return asked >= bound if self.is_least else asked <= bound


_LIMITS: Mapping[str, Limit] = {
    "max_epsilon": Limit(ranges.EPSILON),
    "delta": Limit(ranges.DELTA),
    "max_clip_norm": Limit(ranges.CLIP_NORM, lambda plan: plan.clip_norm),
    "max_sampling_rate": Limit(ranges.SAMPLING_RATE, lambda plan: plan.sampling_rate),
    "min_noise_multiplier": Limit(
        ranges.NOISE_MULTIPLIER, lambda plan: plan.noise_multiplier, is_least=True
    ),
}
_WORDS: Mapping[str, set[str]] = {
    "sampling": set(load_samplers()),
    "adjacency": set(get_args(Adjacency)),
}


def get_rule_names() -> set[str]:
    """Return the names that rules have in a node's config."""
    return {_write_key(field.name) for field in fields(NodePolicy)}


def get_limits() -> dict[str, Limit]:
    """Return the rules that are numbers, by their names in a node's config."""
    return {_write_key(name): limit for name, limit in _LIMITS.items()}


def _write_key(name: str) -> str:
    return name.replace("_", "-")


def _split_words(words: str) -> set[str]:
    return {word.strip() for word in str(words).split(",")}


def _parse_number(value: Value) -> Value:
    """Return the number that a text holds; anything else as it is."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _make_violation(rule: str, bound: Value, asked: Value) -> PolicyViolation:
    return PolicyViolation(
        f"this node's policy {_write_key(rule)}={bound} refuses the run, which asks "
        f"for {asked}"
    )

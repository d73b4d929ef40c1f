"""A privacy target: the epsilon that a run may cost each node, whatever its size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from flwr_safedshb.privacy.accounting import ranges
from flwr_safedshb.privacy.plan import Clipping, PrivacyPlan, Sampling, Unit
from flwr_safedshb.privacy.samplers import Adjacency


@dataclass(frozen=True)
class PrivacyTarget:
    """The epsilon of a whole run; each node finds the noise that meets it.

    A `SafeDSHBClient` takes it in place of a `PrivacyPlan`, and turns it into the plan
    with the least noise that keeps within the target for its own number of examples.

    Attributes
    ----------
    epsilon, delta : float
        What the run may cost one example of the node. Delta must be below
        1/num_examples of every node.
    steps : int
        The most steps that a run takes (T): rounds times local steps. A longer run is
        refused before its first step.
    clip_norm : float
        C, the largest L2 norm of one example's gradient.
    batch_size : int, optional
        b; by default all examples of the node, which has the least noise at the same
        epsilon.
    sampling, adjacency, clipping, unit : str
        See `PrivacyPlan`. With ``unit="person"`` the epsilon is for a person, and
        ``batch_size`` counts persons.
    evaluations : int
        The most private evaluations of a run; a client with a `PrivateEvaluation` needs
        it, because they cost privacy, too.

    Examples
    --------
    >>> target = PrivacyTarget(epsilon=3.0, delta=1e-5, steps=60)
    >>> target.make_plan(num_examples=500).epsilon(steps=60, delta=1e-5) <= 3.0
    True
    """

    epsilon: float
    delta: float
    steps: int
    clip_norm: float = 1.0
    batch_size: int | None = None
    sampling: Sampling = "fixed"
    adjacency: Adjacency = "replace-one"
    clipping: Clipping = "per-example"
    evaluations: int = 0
    unit: Unit = "example"

    def __post_init__(self) -> None:
        ranges.EPSILON.check("epsilon", self.epsilon)
        ranges.check_delta(self.delta)
        for name, least in (("steps", 1), ("evaluations", 0)):
            count = getattr(self, name)
            whole = isinstance(count, Integral) and not isinstance(count, bool)
            if not whole or not least <= count <= ranges.MAX_STEPS:
                raise ValueError(
                    f"{name}={ranges.shorten_value(count)} must be an integer from "
                    f"{least} to {ranges.MAX_STEPS}"
                )
        self._shape_plan(1 if self.batch_size is None else self.batch_size)

    def make_plan(
        self, num_examples: int, beside: Sequence[tuple[PrivacyPlan, int]] = ()
    ) -> PrivacyPlan:
        """Return the plan of a node: the least noise that meets the target.

        The search takes 20 to 200 milliseconds, and its result is kept in the process.

        Parameters
        ----------
        num_examples : int
            m, the examples that the node trains on.
        beside : sequence of (PrivacyPlan, int)
            Other releases of the same examples, such as evaluations, that share the
            target, and how many there are of each.

        Raises
        ------
        ValueError
            If delta is not below 1/m, or no noise meets the target.
        """
        from flwr_safedshb.privacy.accounting import calibration

        shape = self._shape_plan(num_examples)
        check_delta_of_node(self.delta, shape.num_examples)
        return calibration.calibrate(
            shape, self.epsilon, self.delta, self.steps, tuple(beside)
        )

    def _shape_plan(self, num_examples: int) -> PrivacyPlan:
        return PrivacyPlan(
            self.clip_norm,
            1.0,
            num_examples if self.batch_size is None else self.batch_size,
            num_examples,
            self.sampling,
            self.adjacency,
            self.clipping,
            unit=self.unit,
        )


def check_delta_of_node(delta: float, num_examples: int) -> None:
    """Refuse a delta that protects no single example of a node.

    Publishing one example, drawn at random, is (0, 1/m)-differentially private.
    """
    if delta * num_examples >= 1.0:
        raise ValueError(
            f"delta={delta:g} must be below 1/num_examples={1 / num_examples:.3g} of "
            f"this node: it would allow publishing one of its {num_examples} examples; "
            f"use {0.1 / num_examples:.1g} or less"
        )

"""The shape of the JSON file that says what came of a run."""

from __future__ import annotations

from typing import TypedDict


class Evaluations(TypedDict):
    """What the model was worth after some steps; all lists have the same length."""

    step: list[int]
    accuracy: list[float]
    test_loss: list[float]
    training_loss: list[float]


class Rounds(TypedDict):
    """What the server saw in every step; None where the rule does not tell.

    ``metrics`` has every other number of `aggregate_round`, by its name there.
    """

    left_out: list[list[int] | None]
    excluded: dict[str, list[int]]
    replies: list[int]
    skipped: list[int]
    metrics: dict[str, list[float | None]]


class Returned(TypedDict):
    """What the model is worth that the run returned, which its ``output`` names."""

    accuracy: float
    test_loss: float


class Answers(TypedDict):
    """What nodes answered privately: the median over nodes, and where it may lie."""

    step: list[int]
    accuracy: list[float]
    low: list[float]
    high: list[float]
    open_to_liars: list[bool]


class Node(TypedDict):
    """The noise of one node, and the epsilon that it spends in all."""

    num_examples: int
    noise_multiplier: float
    epsilon: float


class Privacy(TypedDict):
    """An epsilon and what it is true for."""

    epsilon: float | None
    delta: float
    steps: int
    sampler: str
    adjacency: str
    accountant: str
    num_examples: int
    seeded_noise: bool
    note: str
    statement: str


class RunRecord(TypedDict):
    """One run.

    ``nodes`` names the nodes that ``rounds["left_out"]`` counts from 0; ``adversaries``
    are among these numbers. ``seconds`` is wall time.
    """

    format: int
    overrides: list[str]
    config: dict[str, object]
    seed: int
    versions: dict[str, str]
    data: dict[str, object]
    nodes: list[str]
    adversaries: list[int]
    evaluations: Evaluations
    rounds: Rounds
    returned: Returned
    answers: Answers
    by_node: list[Node]
    privacy: Privacy
    seconds: float

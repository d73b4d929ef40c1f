"""What nodes answered privately, and each node's own noise, for reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flwr_safedshb.algorithm.private_evaluation import describe_interval
from simulations.results import page
from simulations.results.schema import RunRecord
from simulations.results.statistics import final


def last_answer(runs: Sequence[RunRecord]) -> str | None:
    """Describe the last answer of the nodes and its interval, means over seeds."""
    told = [run["answers"] for run in runs if run["answers"]["step"]]
    if not told:
        return None
    figures = [
        (each["accuracy"][-1], each["low"][-1], each["high"][-1]) for each in told
    ]
    answer, low, high = np.mean(figures, axis=0)
    opened = any(each["open_to_liars"][-1] for each in told)
    interval = describe_interval(float(low), float(high), opened)
    return f"{answer:.2f} ({interval})"


def answers_section(groups: Mapping[str, Sequence[RunRecord]]) -> str:
    """Return a table of what nodes answered, beside the truth; empty if none did."""
    rows = [
        [label, said, str(final(some))]
        for label, some in groups.items()
        if (said := last_answer(some)) is not None
    ]
    if not rows:
        return ""
    return (
        "<h2>What the nodes answer, privately</h2><p>The median over the nodes, each "
        "counting once, of the accuracy that they report on examples of their own that "
        "never train, with noise, and where the honest nodes' median lies with "
        "probability 95 %, whatever the adversaries say (they say that nothing is "
        "right); means over the seeds. Adversaries that are a third of the nodes or "
        "more can take away one end or both, which is then left out. "
        "Beside it the accuracy on a public test set, which is <b>not for the nodes "
        "of a real federation</b>: they have none.</p>"
        + page.table(["", "answer (interval)", "true accuracy, not for nodes"], rows)
    )


def nodes_section(runs: Sequence[RunRecord]) -> str:
    """Return a table of each node's own noise; nothing where all have the same."""
    found = next((run["by_node"] for run in runs if run["by_node"]), None)
    if found is None:
        return ""
    rows = [
        [
            str(node["num_examples"]),
            f"{node['noise_multiplier']:.3g}",
            f"{node['epsilon']:.3f}",
        ]
        for node in found
    ]
    return (
        "<h2>Each node its own noise</h2><p>For one target epsilon, a node with few "
        "examples needs more noise. Epsilon is of everything that the node releases, "
        "steps and answers.</p>"
        + page.table(["examples", "noise multiplier", "epsilon"], rows)
    )

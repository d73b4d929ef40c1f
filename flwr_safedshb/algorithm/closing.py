"""The last three lines of a run: its privacy, its examples, its nodes and its steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from logging import INFO, WARNING
from typing import cast

from flwr.common import log

from flwr_safedshb.algorithm import privacy_report
from flwr_safedshb.algorithm.progress import Progress
from flwr_safedshb.algorithm.wire import SEEN, UNUSABLE

# Nodes that are named in a line.
_MAX_NAMED = 5


def log_closing(progress: Progress) -> None:
    """Log what a run cost, which examples were lost, who took part, what was trained.

    Parameters
    ----------
    progress : Progress
        At the end of the run.
    """
    for loud, line in describe_closing(progress):
        log(WARNING if loud else INFO, "%s", line)
    privacy_report.warn_of_outliers(_last_metrics(progress))


def describe_closing(progress: Progress) -> Iterator[tuple[bool, str]]:
    """Yield the three lines, each with whether it is a warning."""
    last = _last_metrics(progress)
    yield _describe_privacy(last, bool(progress.settings.get("fraction_evaluate")))
    yield _describe_examples(last)
    yield _describe_training(progress)


def _last_metrics(progress: Progress) -> Mapping[str, object]:
    return cast("Mapping[str, object]", progress.train.get(progress.step, {}))


def _describe_privacy(
    metrics: Mapping[str, object], plain_evaluation: bool
) -> tuple[bool, str]:
    epsilons = cast(list[float], metrics.get(privacy_report.EPSILONS, []))
    deltas = cast(list[float], metrics.get(privacy_report.DELTAS, []))
    bare = sum(math.isinf(epsilon) for epsilon in epsilons)
    if not epsilons:
        return True, (
            "Privacy: epsilon is NOT KNOWN, for no node reported one; give the clients "
            "a PrivacyTarget, or delta= beside a PrivacyPlan"
        )
    if bare:
        return True, (
            f"Privacy: NONE, epsilon is infinite: {bare} of {len(epsilons)} nodes add "
            "no noise (noise_multiplier=0); give the clients a PrivacyTarget"
        )
    text = (
        f"Privacy, as {len(epsilons)} nodes report it, for one example or person as "
        f"their plans say: epsilon from {min(epsilons):.4g} to {max(epsilons):.4g}, "
        f"delta up to {max(deltas):.4g}"
    )
    if plain_evaluation:
        text += "; evaluations without noise are NOT covered"
    return plain_evaluation, text


def _describe_examples(metrics: Mapping[str, object]) -> tuple[bool, str]:
    seen, unusable = (cast(int, metrics.get(name, 0)) for name in (SEEN, UNUSABLE))
    if not seen:
        return False, (
            "Examples: a node tells nobody how many of its own cannot be used; "
            "`safedshb doctor` tells its owner"
        )
    return unusable > 0, (
        f"Examples: {unusable:,} of {seen:,} cannot be used and count as zero"
    )


def _describe_training(progress: Progress) -> tuple[bool, str]:
    rounds = list(progress.train.values())
    steps = len(rounds) - len(progress.skipped_rounds)
    reasons: Counter[str] = Counter()
    left_out: Counter[int] = Counter()
    for metrics in rounds:
        for name, count in metrics.items():
            if name.startswith("excluded-") and isinstance(count, int):
                reasons[name.removeprefix("excluded-")] += count
        left_out.update(cast(list[int], metrics.get("left-out", [])))
    size = sum(math.prod(array.shape) for array in progress.arrays.values())
    listed = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    often = sorted(node for node, count in left_out.items() if 2 * count > steps)
    named = ", ".join(map(str, often[:_MAX_NAMED]))
    more = f" and {len(often) - _MAX_NAMED} more" if len(often) > _MAX_NAMED else ""
    f = progress.settings.get("num_malicious_nodes", 0)
    return steps < len(rounds), (
        f"Trained: {size:,} weights in {steps} of {len(rounds)} rounds, for f = {f}; "
        f"replies excluded: {listed or 'none'}; nodes that the rule left out of most "
        f"rounds: {named or 'none'}{more}"
    )

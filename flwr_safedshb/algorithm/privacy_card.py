"""The privacy card of a run: what is known about it, from whom, and what is not.

The server knows its own settings and what nodes state; it does not know what nodes did.
So a card gives every fact with its source. It is written beside the model, as JSON for
programs and as Markdown for people: the Markdown is a Hugging Face model card, or a
section of one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import BinaryIO, Literal, cast

from flwr.app import ArrayRecord, MetricRecord

from flwr_safedshb.aggregation.rule import Rule
from flwr_safedshb.algorithm import privacy_report
from flwr_safedshb.algorithm.progress import Progress
from flwr_safedshb.algorithm.run_identity import fingerprint_arrays
from flwr_safedshb.atomic_io import replace_file
from flwr_safedshb.privacy.plan import PrivacyPlan, PrivacyStatement, describe_unit

FORMAT = "safedshb privacy card 1"
Noise = Literal["unknown", "secure", "seeded"]

_NOT_COVERED = (
    "Whatever else was computed from the same data: other runs (a node's ledger has "
    "the sum of all), statistics, and choices made by looking at the data.",
    "The number of examples of a node, which is treated as public.",
    "How long a node takes to answer, and whether it answers.",
)
_SEEDED = (
    "This run protects nobody: its noise was seeded, so whoever knows the seed can "
    "remove it. Epsilon is that of the same run with noise that nobody can predict."
)
_UNSTATED = "No node stated an epsilon, so the server knows of none."
_WORDS = {
    "secure": "from the operating system's entropy",
    "seeded": "seeded, in a simulation",
    "unknown": "unknown to the server",
}


@dataclass(frozen=True)
class StatedPrivacy:
    """What nodes stated about this run alone, without proof; a hostile node may lie.

    Attributes
    ----------
    nodes : list of int
        The nodes that stated anything, in the last round.
    epsilons, deltas : list of float
        What each of them stated.
    replies : int
        How many nodes' replies were aggregated in the last round.
    """

    nodes: list[int]
    epsilons: list[float]
    deltas: list[float]
    replies: int


@dataclass(frozen=True)
class Robustness:
    """What the server did against adversarial nodes.

    Attributes
    ----------
    rule : str
    num_malicious_nodes : int
        f, an assumption: nothing is proven if more nodes are adversarial.
    kappa : float or None
        The largest constant of all rounds that took a step; None if nothing is proven
        for a round.
    kappa_kind : str
        The spread that kappa multiplies.
    rounds, skipped_rounds, excluded_replies : int
    """

    rule: str
    num_malicious_nodes: int
    kappa: float | None
    kappa_kind: str
    rounds: int
    skipped_rounds: int
    excluded_replies: int


@dataclass(frozen=True)
class PrivacyCard:
    """What is known about the privacy and the robustness of a run.

    Attributes
    ----------
    session : str
        The run's name, also in the nodes' ledgers.
    model : str
        Fingerprint of the model that the run returned.
    stated : StatedPrivacy
    robustness : Robustness
    not_covered : tuple of str
    plan : PrivacyPlan, optional
        The plan in the app's code, if whoever makes the card gives it. Nodes may have
        run others.
    plan_statement : PrivacyStatement, optional
        What the plan costs over the run.
    noise : {"unknown", "secure", "seeded"}
    """

    session: str
    model: str
    stated: StatedPrivacy
    robustness: Robustness
    not_covered: tuple[str, ...]
    plan: PrivacyPlan | None = None
    plan_statement: PrivacyStatement | None = None
    noise: Noise = "unknown"

    def to_dict(self) -> dict[str, object]:
        """Return the card as JSON values, each part with its source."""
        stated, plan = self.stated, None
        if self.plan is not None:
            plan = {
                "source": "the code of the app; nodes may have run another plan",
                **self.plan.to_dict(),
                "unit": get_unit(self.plan),
                "statement": self.plan_statement and _to_json(self.plan_statement),
            }
        return {
            "format": FORMAT,
            "software": {"flwr-safedshb": metadata.version("flwr-safedshb")},
            "session": self.session,
            "model": self.model,
            "stated_by_nodes": {
                "source": "the nodes, unproven, for this run alone",
                "epsilon": _to_number(max(stated.epsilons, default=None)),
                "delta": max(stated.deltas, default=None),
                **asdict(stated),
                "epsilons": [_to_number(epsilon) for epsilon in stated.epsilons],
            },
            "plan": plan,
            "noise": self.noise,
            "robustness": {
                "source": "the server's own settings and metrics",
                **asdict(self.robustness),
            },
            "not_covered": list(self.not_covered),
        }

    def to_markdown(self) -> str:
        """Return the card as a Hugging Face model card, or as a section of one."""
        rows = [*self._list_privacy(), *self._list_robustness()]
        table = [f"| {name} | {value} | {source} |" for name, value, source in rows]
        return "\n".join(
            [
                "---",
                "library_name: flower",
                "tags:",
                "- differential-privacy",
                "- federated-learning",
                "- byzantine-robustness",
                "---",
                "",
                "## Privacy",
                "",
                "Trained with Safe-DSHB: an honest node clips the gradient of each "
                "example, or of each person, and adds noise before anything leaves it, "
                "so its guarantee holds against everybody, the server included.",
                "",
                *([f"**{_SEEDED}**", ""] if self.noise == "seeded" else []),
                "| what | value | who says so |",
                "|---|---|---|",
                *table,
                "",
                "Not covered:",
                "",
                *(f"- {line}" for line in self.not_covered if line != _SEEDED),
                "",
            ]
        )

    def write(self, path: str | Path) -> tuple[Path, Path]:
        """Write `path` + ``.json`` and `path` + ``.md``; return both paths."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        files = Path(f"{path}.json"), Path(f"{path}.md")
        for file, content in zip(files, (text, self.to_markdown()), strict=True):
            replace_file(file, partial(_write_text, content))
        return files

    def _list_privacy(self) -> list[tuple[str, str, str]]:
        stated = self.stated
        count = f"{len(stated.nodes)} of {stated.replies} nodes, unproven"
        rows = []
        if stated.nodes:
            least, most = min(stated.epsilons), max(stated.epsilons)
            spread = f"{most:.4g}" if least == most else f"{least:.4g} to {most:.4g}"
            rows += [
                ("epsilon, of this run alone", spread, count),
                ("delta", f"{max(stated.deltas):.4g}", count),
            ]
        else:
            rows.append(("epsilon", _UNSTATED, "the server"))
        if self.plan is None:
            rows.append(("unit, adjacency, accountant, plan", "not known", "nobody"))
        else:
            app = "the code of the app"
            plan = ", ".join(f"{k} {v}" for k, v in self.plan.to_dict().items())
            rows += [("plan", plan, app), ("unit", get_unit(self.plan), app)]
            if self.plan_statement is not None:
                rows.append(("the plan's cost", str(self.plan_statement), app))
        source = "nobody" if self.noise == "unknown" else "the code of the app"
        rows.append(("noise", _WORDS[self.noise], source))
        return rows

    def _list_robustness(self) -> list[tuple[str, str, str]]:
        found, server = self.robustness, "the server"
        kappa = "nothing is proven for some round"
        if found.kappa is not None:
            kappa = f"at most {found.kappa:.4g} ({found.kappa_kind})"
        return [
            ("rule", found.rule, server),
            ("f, adversarial nodes assumed", str(found.num_malicious_nodes), server),
            ("kappa", kappa, server),
            (
                "rounds",
                f"{found.rounds}, of which {found.skipped_rounds} were skipped",
                server,
            ),
            ("replies excluded", str(found.excluded_replies), server),
        ]


def get_unit(plan: PrivacyPlan) -> str:
    """Return the unit of privacy of a plan: what one neighbour differs in."""
    return f"{describe_unit(plan.unit)} ({plan.adjacency})"


def privacy_card(
    card: PrivacyCard,
    plan: PrivacyPlan | None = None,
    statement: PrivacyStatement | None = None,
    *,
    noise: Noise = "unknown",
    not_covered: Sequence[str] = (),
) -> PrivacyCard:
    """Add to a run's card what its server cannot know.

    Parameters
    ----------
    card : PrivacyCard
        ``strategy.start(...).card``.
    plan : PrivacyPlan, optional
        The plan in the app's code.
    statement : PrivacyStatement, optional
        What the plan costs over the run (`PrivacyPlan.statement`).
    noise : {"unknown", "secure", "seeded"}
        "seeded" is for simulations, whose noise protects nobody.
    not_covered : sequence of str
        Sentences to add, such as one on a person with several examples.

    Examples
    --------
    ``privacy_card(result.card, plan, plan.statement(20, 1e-5)).write("model.privacy")``
    """
    if noise not in _WORDS:
        raise ValueError(f"noise={noise!r} must be one of {', '.join(_WORDS)}")
    more = (_SEEDED,) if noise == "seeded" else ()
    return replace(
        card,
        plan=plan,
        plan_statement=statement,
        noise=noise,
        not_covered=(*more, *card.not_covered, *not_covered),
    )


def make_card(progress: Progress, rule: Rule, model: ArrayRecord) -> PrivacyCard:
    """Return the card of a run from what its server knows.

    Parameters
    ----------
    progress : Progress
        At the end of the run.
    rule : Rule
    model : ArrayRecord
        The model that the run returns.
    """
    last = progress.train.get(progress.step, MetricRecord())
    settings = progress.settings
    rounds = list(progress.train.values())
    steps = [metrics for metrics in rounds if not metrics.get("skipped")]
    kappas = [cast("float | None", metrics.get("kappa")) for metrics in steps]
    proven = None if None in kappas or not kappas else max(cast(list[float], kappas))
    return PrivacyCard(
        session=progress.session,
        model=fingerprint_arrays(model),
        stated=StatedPrivacy(
            cast(list[int], last.get(privacy_report.NODES, [])),
            cast(list[float], last.get(privacy_report.EPSILONS, [])),
            cast(list[float], last.get(privacy_report.DELTAS, [])),
            cast(int, last.get("replies", 0)),
        ),
        robustness=Robustness(
            rule=str(rule),
            num_malicious_nodes=cast(int, settings.get("num_malicious_nodes", 0)),
            kappa=proven,
            kappa_kind=rule.kappa_kind,
            rounds=len(rounds),
            skipped_rounds=len(rounds) - len(steps),
            excluded_replies=sum(cast(int, m.get("excluded", 0)) for m in rounds),
        ),
        not_covered=(*_list_settings(settings), *_NOT_COVERED),
    )


def _to_json(statement: PrivacyStatement) -> dict[str, object]:
    return {**asdict(statement), "epsilon": _to_number(statement.epsilon)}


def _to_number(epsilon: float | None) -> float | str | None:
    """Return an epsilon as a JSON value, which has no infinity."""
    return "infinite" if epsilon == math.inf else epsilon


def _write_text(text: str, file: BinaryIO) -> None:
    file.write(text.encode())


def _list_settings(settings: Mapping[str, object]) -> list[str]:
    """Return what the settings of the server leave uncovered."""
    found = []
    if settings.get("fraction_evaluate"):
        found.append(
            "Evaluations without noise, which this run asked nodes for "
            f"(fraction_evaluate={settings['fraction_evaluate']})."
        )
    if settings.get("foreign_clients"):
        found.append(
            "Replies of other clients than SafeDSHBClient, which this run accepted "
            "(foreign_clients=True): nothing is known about their privacy."
        )
    return found

"""Beyond the paper: ``python -m simulations.study beyond``.

The rules that everybody knows on the same momentums; every rule as adversaries grow in
number; clients that differ; fifty of them; and a task that is not convex.
"""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console

from simulations.config import compose_config
from simulations.data.files import MISSING_FASHION_MNIST, fashion_mnist
from simulations.results.comparison import ATTACK_WORDS, draw_panels, tabulate
from simulations.results.schema import RunRecord
from simulations.results.statistics import final, losses
from simulations.study import Case, Runs, Section, Study, grid

ATTACKS = ("alie", "foe", "sign-flip", "label-flip", "mimic-shift", "strongest")
NO_ATTACK = "no attack, averaged"
FEW_RULES = ("smea", "filter", "average")
ALL_RULES = (
    *("smea", "filter", "caf", "mda", "krum", "multi-krum", "trimmed-mean", "median"),
    *("geometric-median", "nnm", "bucketing", "centred-clipping", "arc"),
    *("static-clipping", "average"),
)
# Adversaries among clients, from a tenth to three sevenths of them.
FRACTIONS = ((1, 10), (2, 10), (3, 10), (4, 10), (3, 7))
WORDS = {
    "average": "FedAvg",
    "krum": "Krum",
    "multi-krum": "MultiKrum",
    "trimmed-mean": "TrimmedMean",
    "median": "Median",
    "geometric-median": "GeometricMedian",
    "smea": "SMEA",
    "filter": "Filter",
    "caf": "CAF",
    "mda": "MDA",
    "nnm": "NNM",
    "bucketing": "Bucketing",
    "centred-clipping": "CentredClipping",
    "arc": "ARC",
    "static-clipping": "StaticClipping",
}


@dataclass(frozen=True)
class Part:
    """A question: rules against attacks, in some settings of a federation.

    Attributes
    ----------
    title, question : str
    common : str
        Overrides of all runs.
    rules : sequence of str
        Names of ``conf/aggregation``.
    attacks : sequence of str
    search : str
        Overrides of attacked runs: how much the adversaries search.
    settings : mapping of words to overrides
        Panels are attacks times these.
    """

    title: str
    question: str
    common: str
    rules: Sequence[str] = FEW_RULES
    attacks: Sequence[str] = ATTACKS
    search: str = ""
    settings: Mapping[str, str] = field(default_factory=lambda: {"": ""})

    def cases(self, name: str) -> Iterator[Case]:
        """Yield the honest clients alone, then every attacked run."""
        common = shlex.split(self.common)
        if name == "network" and (folder := fashion_mnist()) is not None:
            common.append(f"data.path={folder}")
        axes = {"part": {name: ""}, "setting": self.settings}
        for case in grid(*common, **axes, attack={"": ""}, rule={NO_ATTACK: ""}):
            cfg = compose_config(shlex.join(case.overrides))
            counts = ("num_nodes=", "num_malicious_nodes=")
            kept = [o for o in case.overrides if not o.startswith(counts)]
            honest = f"num_nodes={cfg.num_nodes - cfg.num_malicious_nodes}"
            alone = ("num_malicious_nodes=0", "attack=none", "aggregation=average")
            yield Case(case.labels, (*kept, honest, *alone))
        attacks = {one: f"attack={one} {self.search}" for one in self.attacks}
        rules = {one: f"aggregation={one}" for one in self.rules}
        yield from grid(*common, **axes, attack=attacks, rule=rules)


PARTS = {
    "rules": Part(
        "Other rules on the same momentums",
        "The paper's task at moderate privacy, 3 adversaries among 7 clients: what do "
        "the rules that everybody knows do with the very same messages? (The trimmed "
        "mean of 7 less 2 x 3 values is the median.)",
        "experiment=paper privacy=moderate",
        rules=(
            *("smea", "filter", "average", "krum", "multi-krum", "trimmed-mean"),
            *("median", "geometric-median"),
        ),
    ),
    "fractions": Part(
        "Every rule, as adversaries grow in number",
        "The paper's task at low privacy, 200 steps, under the strongest attack that "
        "the adversaries find for each rule; clients that are alike, and clients who "
        "share each label by a Dirichlet distribution with alpha = 1.",
        "experiment=paper steps=200",
        search="+attack.places=2",
        rules=ALL_RULES,
        attacks=("strongest",),
        settings={
            f"f = {f} of {n}, {words}": f"num_nodes={n} num_malicious_nodes={f} {split}"
            for words, split in (("iid", "split=iid"), ("unlike", "split=dirichlet"))
            for f, n in FRACTIONS
        },
    ),
    "heterogeneity": Part(
        "Clients that differ",
        "The paper's task at low privacy, 2 adversaries among 10 clients, each label "
        "shared out by a Dirichlet distribution: small alpha, very different clients.",
        "experiment=heterogeneous",
        rules=("smea", "filter"),
        attacks=("alie", "label-flip", "strongest"),
        settings={f"alpha = {a}": f"split.alpha={a}" for a in (0.1, 1, 10)},
    ),
    "large": Part(
        "A larger federation",
        "The paper's task at moderate privacy, 10 adversaries among 50 clients, 100 "
        "steps. SMEA looks for the best of 10^10 subsets.",
        "experiment=large",
    ),
    "network": Part(
        "A network",
        "Fashion-MNIST, a convolutional network with 26,090 weights, 3 adversaries "
        "among 10 clients, 100 steps at low privacy.",
        "experiment=fashion",
    ),
}


def make_cases(args: Namespace) -> Iterable[Case]:
    """Return the runs of all parts; the network needs its images."""
    there = fashion_mnist() is not None
    if not there and vars(args):
        words = f"The part 'network' is left out: {MISSING_FASHION_MNIST}."
        Console().print(words, style="yellow", highlight=False)
    for name, part in PARTS.items():
        if there or name != "network":
            yield from part.cases(name)


def report(runs: Runs[RunRecord]) -> Iterator[Section]:
    """Yield a section for each part."""
    words = {**ATTACK_WORDS, **WORDS}
    for name, some in runs.by("part").items():
        # The setting names a panel after the attack.
        mine = Runs(
            {
                Case(
                    {k: case.labels[k] for k in ("attack", "setting", "rule")},
                    seed=case.seed,
                ): run
                for case, run in some.items()
            }
        )
        spent = sum(run["seconds"] for run in some.values())
        yield Section(
            PARTS[name].title,
            PARTS[name].question,
            tabulate(mine, words, _describe, epsilon=True),
            draw_panels(mine, words),
            notes=f"{len(some)} runs with seeds {some.seeds}, {spent:.0f} s in all.",
        )
    said = next(iter(runs.values()))["privacy"]
    yield Section(
        "How to read the tables",
        "Final test accuracy, mean ± standard deviation over the seeds. ↗ marks a "
        "training loss that ends higher than it began. Epsilon is at delta = "
        f"{said['delta']:g}, {said['sampler']}, {said['adjacency']} adjacency, "
        f"{said['accountant']}; of the node with the fewest examples.",
        notes=said["note"],
    )


def _describe(runs: Sequence[RunRecord]) -> str:
    return f"{final(runs)}{'' if losses(runs).falls else ' ↗'}"


study = Study(
    "beyond",
    "Safe-DSHB beyond the paper",
    "Other rules, tasks and federations than the paper's.",
    make_cases,
    seeds=(1, 2),
    report=report,
    words=WORDS,
    page="docs/reproduce.md",
)

"""Hospitals train a tumour classifier, and some are hijacked: ``make demo``.

Seven hospitals hold tumours that they may show to nobody, some many and some few; two
of them are in hostile hands, and the server that joins what they learn is curious. The
same training runs six times over: the honest hospitals among themselves; all seven,
averaged; with SMEA; with Filter; and with both under the strongest attack that we ship.
What a model is worth the hospitals say themselves, privately, and the hijacked ones
lie. No network, no data on disk: the tumours are scikit-learn's ``breast_cancer``.
"""

from __future__ import annotations

from collections.abc import Iterator

from simulations.results.answers import last_answer
from simulations.results.comparison import draw_panels
from simulations.results.schema import RunRecord
from simulations.results.statistics import final, format_epsilons
from simulations.results.tables import Table
from simulations.study import Runs, Section, Study, grid

ATTACKED = "experiment=hospitals"
SETTINGS = {
    "no attack": "experiment=hospitals-unharmed",
    "plain averaging, FOE": f"{ATTACKED} aggregation=average",
    "SMEA, FOE": f"{ATTACKED} aggregation=smea",
    "Filter, FOE": f"{ATTACKED} aggregation=filter",
    "SMEA, strongest": f"{ATTACKED} aggregation=smea attack=strongest",
    "Filter, strongest": f"{ATTACKED} aggregation=filter attack=strongest",
}
# A model that has learnt nothing says "benign" to all.
CHANCE = 0.63


def tell_story(run: RunRecord) -> str:
    """Say what happens in an attacked run, with its figures."""
    config = run["config"]
    n, f = config["num_nodes"], config["num_malicious_nodes"]
    sizes = [node["num_examples"] for node in run["by_node"]]
    noise = [node["noise_multiplier"] for node in run["by_node"]]
    target = config["privacy"]["target_epsilon"]  # type: ignore[index]
    return (
        f"{n} hospitals train a classifier of tumours, malignant or benign. The honest "
        f"ones hold {', '.join(map(str, sizes))} tumours. The server is curious, so "
        "every hospital clips the gradient of each tumour, adds Gaussian noise and "
        f"sends only its momentum. Every hospital reaches epsilon {target:g}; smaller "
        f"ones need more noise (multiplier {max(noise):.2g} for {min(sizes)} tumours, "
        f"{min(noise):.2g} for {max(sizes)}). A quarter of a hospital's tumours never "
        "train: with them it answers, with noise again, how good the model is.\n\n"
        f"{f} hospitals are hijacked: in every step they see what the honest ones "
        "send. Under FOE they send the opposite of its mean, in the strength that "
        "harms the server's rule the most. Under the strongest attack they search, "
        "with tumours of their own, for what harms the most in that step. And they "
        "answer that nothing is right."
    )


def report(runs: Runs[RunRecord]) -> Iterator[Section]:
    """Yield the story, the curves, and what each training came to."""
    groups = runs.groups("training")
    attacked = next((v for k, v in groups.items() if k != "no attack"), None)
    if attacked is not None:
        yield Section("What happens", tell_story(attacked[0]))
    rows = []
    for setting, some in groups.items():
        worst = min(run["returned"]["accuracy"] for run in some)
        said = last_answer(some) or "-"
        # At or below chance the training is lost.
        mark = "" if worst > CHANCE else "**"
        row = [
            said,
            f"{mark}{final(some)}{mark}",
            f"{worst:.3f}",
            format_epsilons(some),
        ]
        rows.append([setting, *row])
    spent = next(iter(runs.values()))["privacy"]
    yield Section(
        "With and without an attack",
        table=Table(["", "answer, 95 %", "accuracy*", "worst", "epsilon"], rows),
        panels=draw_panels(runs, {}),
        notes="\\* on tumours that no hospital holds: not for hospitals, who have no "
        "public test set. Mean ± standard deviation over the seeds; to "
        f"call every tumour benign gives about {CHANCE:.2f}. The answer is the median "
        "that hospitals report, each counting once, and where the honest hospitals' "
        "median lies whatever hijacked ones say; means over the seeds. Epsilon, at "
        f"delta = {spent['delta']:g} after {spent['steps']} steps and one answer, is "
        "what each honest hospital spends on each single tumour of its own against "
        "everyone else, the server included: "
        f"{spent['sampler']}, {spent['adjacency']} adjacency, {spent['accountant']}. "
        f"{spent['note']}",
    )


study = Study(
    "demo",
    "Hospitals train a tumour classifier, and some are hijacked",
    "",
    grid(training=SETTINGS),
    seeds=(1, 2, 3, 4, 5),
    report=report,
    # Who asks for a demo wants to see it run.
    again=True,
)

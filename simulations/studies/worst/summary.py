"""What the worst attack leaves of each setting, as tables and heatmaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from simulations.results import page, plots
from simulations.results.schema import RunRecord
from simulations.results.summary import ATTACK_WORDS, late, table
from simulations.studies.worst.cases import Case, Setting

Runs = Mapping[Case, RunRecord]
TITLE = "Safe-DSHB against the worst attack"
# An attack beats another if its loss is higher by more than so many standard errors.
ERRORS = 2.0


def losses(runs: Runs) -> dict[Setting, dict[str, list[float]]]:
    """Return training losses over the last quarter of the steps, by seed."""
    found: dict[Setting, dict[str, list[float]]] = {}
    for case, run in runs.items():
        by_attack = found.setdefault(case.setting, {})
        value = float(late([run], "training_loss")[0])
        by_attack.setdefault(case.attack, []).append(value)
    return found


def beaten(by_attack: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the attacks that leave a clearly higher loss than the strongest does."""
    most = by_attack.get("strongest")
    if most is None:
        return []
    found = []
    for attack, values in by_attack.items():
        apart = float(np.mean(values) - np.mean(most))
        # Seeds are the same for all attacks, so that differences are what varies.
        gaps = np.asarray(values) - np.asarray(most)
        error = gaps.std(ddof=1) / np.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
        if apart > ERRORS * error and apart > 1e-3:
            found.append(attack)
    return found


def chosen(found: Mapping[Setting, Mapping[str, Sequence[float]]]) -> list[Setting]:
    """Return, for each federation, the setting whose worst attack does least."""
    best: dict[object, Setting] = {}
    for setting, by_attack in found.items():
        held = best.get(setting.federation)
        if held is None or worst(by_attack)[1] < worst(found[held])[1]:
            best[setting.federation] = setting
    return list(best.values())


def worst(by_attack: Mapping[str, Sequence[float]]) -> tuple[str, float]:
    """Return the attack that leaves the highest loss, and that."""
    means = {attack: float(np.mean(values)) for attack, values in by_attack.items()}
    attack = max(means, key=lambda name: means[name])
    return attack, means[attack]


def markdown(runs: Runs) -> str:
    """Return the losses under every attack, and what to choose."""
    found = losses(runs)
    attacks = list(dict.fromkeys(case.attack for case in runs))
    seeds = sorted({case.seed for case in runs})
    rows, over = [], []
    for setting, by_attack in found.items():
        cells = [f"{np.mean(by_attack[a]):.3f}" for a in attacks]
        more = beaten(by_attack)
        rows.append([setting.rule, setting.words, *cells, worst(by_attack)[0]])
        over += [f"{setting.rule}, {setting.words}: {ATTACK_WORDS[a]}" for a in more]
    heads = ["rule", "setting", *(ATTACK_WORDS[a] for a in attacks), "worst"]
    lines = [
        f"Training loss, mean over the last quarter of the steps, seeds {seeds}: a "
        "model with momentum swings, and where the last step catches it is chance.",
        "",
        *table(heads, rows),
        "",
    ]
    if "strongest" in attacks:
        cells_count = len(found) * (len(attacks) - 1)
        told = "; ".join(over) or "none"
        lines += [
            f"Of {cells_count} pairs of setting and other attack, these leave a loss "
            f"above that of strongest by more than {ERRORS:g} standard errors: {told}.",
            "",
        ]
    lines += ["Against its worst attack the best of the settings is:", ""]
    best = [[it.rule, it.words, *map(str, _worst(found[it]))] for it in chosen(found)]
    return "\n".join([*lines, *table(["rule", "setting", "attack", "loss"], best), ""])


def _worst(by_attack: Mapping[str, Sequence[float]]) -> tuple[str, str]:
    attack, value = worst(by_attack)
    return ATTACK_WORDS[attack], f"{value:.3f}"


def heatmaps(runs: Runs) -> dict[str, Figure]:
    """Return a heatmap for each rule: settings against attacks."""
    found = losses(runs)
    attacks = list(dict.fromkeys(case.attack for case in runs))
    figures = {}
    for rule in dict.fromkeys(setting.rule for setting in found):
        mine = {it: losses for it, losses in found.items() if it.rule == rule}
        values = np.array([[np.mean(v[a]) for a in attacks] for v in mine.values()])
        names = [it.words for it in mine]
        heads = [ATTACK_WORDS[a] for a in attacks]
        figures[rule] = plots.heatmap(values, names, heads, f"{rule}: training loss")
    return figures


def report(runs: Runs) -> str:
    """Return the page: heatmaps, then the tables."""
    maps = [page.picture(figure, name) for name, figure in heatmaps(runs).items()]
    text = markdown(runs)
    body = [
        f"<h1>{TITLE}</h1>",
        page.pictures(maps),
        f'<pre class="notes">{text}</pre>',
    ]
    return page.whole(TITLE, body)

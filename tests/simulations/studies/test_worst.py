"""Settings against the worst attack: the grid, what is chosen, and the report."""

from pathlib import Path

import pytest

from simulations.config import composed
from simulations.results import record
from simulations.results.schema import RunRecord
from simulations.results.sweep import Sweep
from simulations.studies.worst.__main__ import main
from simulations.studies.worst.cases import Case, Setting, cases, settings
from simulations.studies.worst.summary import beaten, chosen, losses, markdown
from tests.records import as_if_of, made_up

TINY = ("data=synthetic", "data.num_examples=500")
GRID = settings(["smea", "filter"], [1], 5, [1.0], [0.0], [0.5, 1.0], [0.9])
# By rule and rate: under FOE, and under the strongest.
LOSSES = {
    ("smea", 0.5): (0.3, 0.5), ("smea", 1.0): (0.2, 0.9),
    ("filter", 0.5): (0.25, 0.6), ("filter", 1.0): (0.8, 0.4),
}  # fmt: skip


def made_up_runs() -> dict[Case, RunRecord]:
    runs = {}
    for case in cases(GRID, ["foe", "strongest"], [1, 2]):
        pair = LOSSES[case.setting.rule, case.setting.rate]
        loss = pair[case.attack == "strongest"] + 0.001 * case.seed
        runs[case] = made_up(0.9, (0.7, loss), case.seed)
    return runs


@pytest.mark.federation
def test_a_run_is_what_its_setting_says() -> None:
    it = Setting("krum", 2, 9, 2.0, 1.0, 0.5, 0.9)
    cfg = composed(" ".join(Case(it, "drift", 3).overrides))
    assert (cfg.num_nodes, cfg.num_malicious_nodes, cfg.seed) == (9, 2, 3)
    assert (cfg.server_learning_rate, cfg.momentum, cfg.split.alpha) == (0.5, 0.9, 1.0)
    assert cfg.privacy.plan.noise_multiplier == 2.0
    assert "Krum" in str(cfg.aggregation)


def test_the_setting_whose_worst_attack_does_least_is_chosen() -> None:
    (best,) = chosen(losses(made_up_runs()))
    assert (best.rule, best.rate) == ("smea", 0.5)  # not the best under FOE


def test_an_attack_that_beats_the_strongest_is_told() -> None:
    found = losses(made_up_runs())
    over = {(it.rule, it.rate): beaten(by_attack) for it, by_attack in found.items()}
    assert [key for key, value in over.items() if value] == [("filter", 1.0)]
    assert "FOE" in markdown(made_up_runs()).partition("standard errors: ")[2]


@pytest.mark.federation
def test_the_command_leaves_heatmaps_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for case, run in made_up_runs().items():
        overrides = Sweep(tmp_path, (case,), TINY).overrides_of(case)
        path = tmp_path / "runs" / f"{case.name}.json"
        record.write(path, as_if_of(run, overrides))
    given = "--rules smea filter --malicious 1 --nodes 5 --noises 1 --rates 0.5 1"
    given += f" --momentums 0.9 --attacks foe strongest --seeds 1 2 --output {tmp_path}"
    assert main([*given.split(), "--set", *TINY]) == 0
    assert (tmp_path / "figures" / "smea.png").exists()
    assert (tmp_path / "report.html").read_text().count("<figure") == 2
    assert "16 runs, 16 of them are there" in capsys.readouterr().out
    assert main(["--nodes", "5", "--malicious", "3"]) == 2

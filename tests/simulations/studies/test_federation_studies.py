"""The studies that train: which runs, what is skipped, and what is made of them."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from flwr_safedshb.privacy.accounting import baselines
from flwr_safedshb.privacy.plan import PrivacyPlan
from simulations.check import check
from simulations.config import compose_config, resolve_config
from simulations.data import files
from simulations.data.files import fashion_mnist
from simulations.experiment import load_federation
from simulations.models import MLP
from simulations.results.comparison import ATTACK_WORDS
from simulations.results.schema import RunRecord
from simulations.studies import (
    beyond,
    federations,
    picture,
    schedules,
    withstand,
    worst,
    yardstick,
)
from simulations.study import Case, Runs, Section, Study, main
from tests.configured import CONF
from tests.records import made_up
from tests.simulations.test_study import keep_as_if_run

TINY = ("data=synthetic", "data.num_examples=5000")


@pytest.fixture
def no_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fashion-MNIST is not on this machine."""
    monkeypatch.setattr(files, "DEBIAN_FASHION_MNIST", str(tmp_path / "none"))
    monkeypatch.delenv("SAFEDSHB_DATA", raising=False)


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that looks as if Fashion-MNIST were in it."""
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    (folder / "train-images-idx3-ubyte.gz").touch()
    monkeypatch.setattr(files, "DEBIAN_FASHION_MNIST", str(tmp_path / "none"))
    monkeypatch.setenv("SAFEDSHB_DATA", str(tmp_path))
    return folder


def cases(study: Study, given: str = "") -> list[Case]:
    return list(study.choose_cases(study.parser().parse_args(given.split())))


def only(study: Study, **labels: str) -> str:
    """Return the overrides of the only run with these labels."""
    (case,) = (
        c for c in study.list_cases(Namespace()) if labels.items() <= c.labels.items()
    )
    return " ".join([*case.overrides, "seed=1"])


def text_of(sections: Sequence[Section]) -> str:
    tables = [section.table.markdown for section in sections if section.table]
    return "\n".join([*tables, *(f"{s.title} {s.text} {s.notes}" for s in sections)])


def test_beyond_has_every_rule_attack_and_part(images: Path) -> None:
    everything = list(beyond.make_cases(Namespace()))
    assert len(everything) == len({case.name for case in everything}) == 536 / 2

    def labels(part: str, axis: str) -> set[str]:
        return {c.labels[axis] for c in everything if c.labels["part"] == part}

    assert labels("rules", "rule") == {
        beyond.NO_ATTACK, "average", "krum", "multi-krum", "trimmed-mean", "median",
        "geometric-median", "smea", "filter",
    }  # fmt: skip
    for part in ("rules", "large", "network"):
        assert labels(part, "attack") == {"", *beyond.ATTACKS}
    known = {path.stem for path in (CONF / "aggregation").glob("*.yaml")}
    peers = {"bulyan", "cge", "dnc", "meamed", "monna", "sign-guard"}
    assert labels("fractions", "rule") - {beyond.NO_ATTACK} == known - peers - {
        "filter-literal"
    }
    assert labels("heterogeneity", "setting") == {
        "alpha = 0.1", "alpha = 1", "alpha = 10",
    }  # fmt: skip
    (network, *_) = (c for c in everything if c.labels["part"] == "network")
    assert f"data.path={images}" in network.overrides


@pytest.mark.parametrize(
    ("part", "n", "f"),
    [("rules", 7, 3), ("heterogeneity", 10, 2), ("large", 50, 10), ("network", 10, 3)],
)
def test_beyond_compares_with_as_many_honest_clients(
    part: str, n: int, f: int, images: Path
) -> None:
    setting = next(iter(beyond.PARTS[part].settings))
    where = {"part": part, "setting": setting}
    attacked = resolve_config(only(beyond.study, **where, rule="smea", attack="alie"))
    unharmed = resolve_config(only(beyond.study, **where, rule=beyond.NO_ATTACK))
    assert (attacked["num_nodes"], attacked["num_malicious_nodes"]) == (n, f)
    assert (unharmed["num_nodes"], unharmed["num_malicious_nodes"]) == (n - f, 0)
    same = ("steps", "momentum", "server_learning_rate", "privacy", "data", "split")
    assert {key: attacked[key] for key in same} == {key: unharmed[key] for key in same}
    assert f"{f} adversaries among {n}" in beyond.PARTS[part].question


def test_the_honest_hold_the_same_with_and_without_an_attack() -> None:
    where = {"part": "heterogeneity", "setting": "alpha = 1"}
    attacked = only(beyond.study, **where, rule="smea", attack="alie")
    unharmed = only(beyond.study, **where, rule=beyond.NO_ATTACK)
    more = " data=synthetic privacy.plan.batch_size=1"
    held = [load_federation(f"{text}{more}") for text in (attacked, unharmed)]
    assert held[0].sizes == held[1].sizes
    assert len(set(held[0].sizes)) > 1
    assert torch.equal(held[0].training[0], held[1].training[0])


def test_beyond_has_a_row_for_each_panel_and_marks_what_diverges() -> None:
    def make(case: Case) -> RunRecord:
        hurt = case.labels["rule"] == "average"
        accuracy, losses = (0.3, (0.7, 50.0)) if hurt else (0.9, (0.7, 0.2))
        return made_up(accuracy, losses, case.seed, case.overrides)

    chosen = cases(beyond.study, "--part heterogeneity large --seeds 1 2")
    sections = list(beyond.report(Runs({case: make(case) for case in chosen})))
    text = text_of(sections)
    assert "| ALIE, alpha = 0.1 | 0.900 ± 0.000 | 0.900 ± 0.000 |" in text
    assert "| FOE |" + " 0.900 ± 0.000 |" * 3 + " 0.300 ± 0.000 ↗ |" in text
    assert "38 runs with seeds [1, 2], 76 s in all." in text
    assert "A network" not in text
    panel = sections[1].panels["FOE"]["accuracy"]
    assert {len(curve.values) for curve in panel.values()} == {2}


def test_without_the_images_a_part_is_left_out(
    no_images: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["beyond", "--part", "network", "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        main(given)
    assert "invalid choice: 'network'" in capsys.readouterr().err
    assert cases(beyond.study)
    printed = " ".join(capsys.readouterr().out.split())
    assert "apt-get install dataset-fashion-mnist" in printed
    assert main(["yardstick", "--output", str(tmp_path / "out")]) == 2
    assert "dataset-fashion-mnist" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_images_may_lie_beside_other_data(images: Path) -> None:
    assert fashion_mnist() == images


@pytest.mark.parametrize("epsilon", [0.125, 2.0])
def test_the_noise_is_that_of_the_papers_epsilon(epsilon: float) -> None:
    noise = yardstick.NOISES[epsilon]
    plan = PrivacyPlan(1.0, noise, 16, 3000, "poisson", "add-remove")
    found = baselines.rdp(plan, 1500, 1.497e-4).epsilon
    assert epsilon * 0.995 < found <= epsilon * 1.0005


def test_the_yardsticks_setting_is_the_papers(images: Path) -> None:
    where = {"epsilon": "2", "rule": "SMEA", "attack": "label flip"}
    cfg = compose_config(only(yardstick.study, **where))
    assert (cfg.num_nodes, cfg.num_malicious_nodes, cfg.steps) == (33, 13, 1500)
    assert (cfg.privacy.plan.sampling, cfg.privacy.plan.batch_size) == ("poisson", 16)
    model = MLP(784, 10, list(cfg.model.hidden))
    assert sum(p.numel() for p in model.parameters()) == 25_450
    assert len({case.name for case in cases(yardstick.study)}) == 15 * 7


def test_the_yardsticks_tables_are_side_by_side(images: Path) -> None:
    chosen = cases(yardstick.study, "--epsilon 0.5 2 --rule SMEA average --seeds 1 2")
    runs = Runs({case: made_up(0.7, (2.3, 0.9), case.seed) for case in chosen})
    text = text_of(list(yardstick.report(runs)))
    assert "| Xiang et al. | no attack | 0.775 | 0.800 |" in text
    assert "| Safe-DSHB, average | no attack | 0.700 ± 0.000 (-0.075) |" in text
    assert "| Safe-DSHB, SMEA | strongest | 0.700 ± 0.000 (-0.060) |" in text
    assert "| 2 | 0.792 | 1.55" in text  # their unit, and ours


def test_who_is_there_if_nobody_attacks() -> None:
    """Sizes are of honest nodes: without an adversary there is one node less."""
    for row, honest in (("with the small node", 5), ("without it", 4)):
        for attack, hostile in (("nobody", 0), ("foe", 1)):
            where = {"part": "unequal", "row": row, "attack": attack, "column": "smea"}
            cfg = compose_config(only(federations.study, **where))
            assert cfg.num_nodes == honest + hostile
            assert cfg.num_malicious_nodes == 1
            assert len(cfg.split.sizes) == honest


def test_the_tables_of_federations_have_every_figure(no_images: None) -> None:
    chosen = cases(federations.study, "--seeds 1 2")
    assert len(chosen) == 2 * 84
    runs = Runs(
        {c: made_up(0.5 + c.seed / 10, (0.7, 0.3), seed=c.seed) for c in chosen}
    )
    text = text_of(list(federations.report(runs)))
    assert "2 seeds." in text
    assert text.count("0.650 ± 0.071") == 4 * 9 + 4 * 12 + 4 * 6
    assert "smea, last | smea, mean" in text


@pytest.mark.federation
def test_what_a_federation_is_asked_for_can_run() -> None:
    where = {"row": "paper, low privacy", "attack": "foe", "column": "K = 10"}
    check(f"{only(federations.study, **where)} data=synthetic")


def test_the_picture_compares_averaging_once_with_every_panel() -> None:
    runs = Runs({case: made_up(0.9, (0.7, 0.3)) for case in cases(picture.study)})
    assert len(runs) == 7 * 5
    drawn = picture.draw_picture(runs)
    assert [len(axes.lines) for axes in drawn.axes] == [4, 4]


# Of the sweep against the worst attack, by rule and rate: under FOE, and strongest.
LOSSES = {
    ("smea", "0.5"): (0.3, 0.5), ("smea", "1"): (0.2, 0.9),
    ("filter", "0.5"): (0.25, 0.6), ("filter", "1"): (0.8, 0.4),
}  # fmt: skip
GRID = "--rules smea filter --malicious 1 --nodes 5 --noises 1 --rates 0.5 1 "
GRID += "--schedules paper --momentums 0.9 --attacks foe strongest --seeds 1 2"


def make_swept_run(case: Case) -> RunRecord:
    pair = LOSSES[case.labels["rule"], case.labels["rate"]]
    loss = pair[case.labels["attack"] == "strongest"] + 0.001 * case.seed
    run = made_up(0.9, (0.7, 0.2), case.seed)
    run["evaluations"]["test_loss"][-1] = loss
    run["returned"]["test_loss"] = loss + 0.01
    return run


def test_a_swept_run_is_what_its_setting_says() -> None:
    given = "--rules krum --malicious 2 --nodes 9 --noises 2 --alphas 1 --rates 0.5 "
    given += "--schedules paper "
    (case,) = cases(worst.study, f"{given} --momentums 0.9 --attacks drift --seeds 3")
    cfg = compose_config(" ".join([*case.overrides, "seed=3"]))
    assert (cfg.num_nodes, cfg.num_malicious_nodes, cfg.seed) == (9, 2, 3)
    assert (cfg.server_learning_rate, cfg.momentum, cfg.split.alpha) == (0.5, 0.9, 1.0)
    assert cfg.privacy.plan.noise_multiplier == 2.0
    assert "Krum" in str(cfg.aggregation)


def test_schedules_of_the_sweep_spend_the_same() -> None:
    given = "--noises 2 --momentums 0.9 --attacks lookahead-average --seeds 1"
    paper, full = cases(worst.study, given)
    found = [compose_config(" ".join([*case.overrides])) for case in (paper, full)]
    spent = PrivacyPlan(1.0, 2.0, 25, 2763).epsilon(400, 1e-4)
    assert found[1].privacy.target_epsilon == pytest.approx(spent, rel=1e-5)
    assert (found[1].privacy.plan.batch_size, found[1].steps) == (2763, 60)
    assert [cfg.server_learning_rate for cfg in found] == [1.0, 73.5]
    assert [cfg.attack.output for cfg in found] == ["average"] * 2


def test_the_setting_whose_worst_attack_does_least_is_chosen() -> None:
    runs = Runs({case: make_swept_run(case) for case in cases(worst.study, GRID)})
    found = worst.final_losses(runs)
    (best,) = worst.choose_settings(found)
    assert best[:2] == ("smea", "0.5")  # not the best under FOE
    assert "last" in best
    stronger = {it[:2]: worst.stronger_attacks(of) for it, of in found.items()}
    assert [key for key, value in stronger.items() if value] == [("filter", "1")]
    text = text_of(list(worst.report(runs)))
    assert "FOE" in text.partition("standard errors: ")[2]


@pytest.mark.federation
def test_the_sweep_leaves_tables_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_as_if_run(tmp_path, "worst", GRID.split(), make_swept_run, TINY)
    given = [*GRID.split(), "--output", str(tmp_path), "--set", *TINY]
    assert main(["worst", *given]) == 0
    assert "rate x 0.5" in (tmp_path / "report.html").read_text()
    assert "16 runs, 16 of them are there" in capsys.readouterr().out
    assert main(["worst", "--nodes", "5", "--malicious", "3"]) == 2


# A federation that should not withstand colluders, and one that should.
TASK = "synthetic, d = 21"
SETTINGS = {
    "bad": {"task": TASK, "schedule": "short", "federation": "7, 1, epsilon 0.1"},
    "good": {"task": TASK, "schedule": "short", "federation": "10, 1, epsilon 8"},
}


def make_withstand_runs(attacked: float) -> Runs[RunRecord]:
    runs: Runs[RunRecord] = Runs()
    for labels in SETTINGS.values():
        for case in cases(withstand.study):
            if labels.items() <= case.labels.items():
                loss = 0.3 if case.labels["attack"] == "no attack" else attacked
                runs[case] = made_up(0.9, (0.7, loss), overrides=case.overrides)
                runs[case]["evaluations"]["test_loss"][0] = 0.7
                runs[case]["returned"]["test_loss"] = loss
    return runs


def test_federations_on_six_tasks_each_once_with_as_many_honest_clients() -> None:
    chosen = cases(withstand.study)
    assert len({case.name for case in chosen}) == len(chosen) == 3 * 126
    first, second = (
        compose_config(only(withstand.study, **SETTINGS["bad"], attack=attack))
        for attack in ("strongest", "no attack")
    )
    assert first.num_nodes - first.num_malicious_nodes == second.num_nodes == 6
    assert first.privacy.plan.batch_size == second.privacy.plan.batch_size == 800
    assert "Strongest" in str(first.attack)


def test_half_of_the_progress_decides() -> None:
    kept, lost = (
        withstand.find_outcomes(make_withstand_runs(loss)) for loss in (0.49, 0.51)
    )
    said = [one.predicted.verdict for one in kept]
    assert said == ["will not withstand", "will withstand"]
    assert all(one.withstood for one in kept)
    assert not any(one.withstood for one in lost)
    assert [one.is_wrong for one in kept] == [True, False]
    assert [one.is_wrong for one in lost] == [False, True]
    text = withstand.describe_reliability(lost)
    assert text.startswith("Of 2 settings 100% got an answer")
    assert "“will withstand” was wrong in 1 of 1" in text
    rows = text_of(list(withstand.report(make_withstand_runs(0.51))))
    assert "| **will withstand** |" in rows


def make_schedule_runs() -> Runs[RunRecord]:
    accuracies = {"target": 0.8, "strongest": 0.85, "none": 0.82}
    return Runs(
        {
            case: made_up(accuracies.get(case.labels["attack"], 0.9), (0.7, 0.3))
            for case in cases(schedules.study)
        }
    )


def test_the_worst_attack_is_shown_and_whether_federating_pays() -> None:
    chosen = cases(schedules.study)
    assert len({case.name for case in chosen}) == len(chosen)
    worst, pays, every = schedules.report(make_schedule_runs())
    assert worst.table is not None
    assert worst.table.rows[0] == [
        "n = 7, f = 3, epsilon 1", "tuned", "target", "0.800 ± 0.000", "0.800 ± 0.000",
        "0.200",
    ]  # fmt: skip
    assert pays.table is not None
    assert pays.table.rows[0][1:] == [
        "0.800 ± 0.000", "0.820 ± 0.000", "-0.020", "**no**"
    ]  # fmt: skip
    assert every.table is not None
    assert len(every.table.rows) == len(ATTACK_WORDS)


def test_the_shipped_experiment_is_the_schedule_of_the_study() -> None:
    labels = {"schedule": schedules.TUNED, "attack": "target"}
    federation = str(schedules.FEDERATIONS[0])
    given = resolve_config(only(schedules.study, federation=federation, **labels))
    shipped = resolve_config("experiment=withstand engine=batched")
    assert {k: v for k, v in given.items() if k != "evaluate_every"} == {
        k: v for k, v in shipped.items() if k != "evaluate_every"
    }

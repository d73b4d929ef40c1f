"""The reproduction: which runs, each once, and what is made of them."""

from collections import Counter
from collections.abc import Sequence

from simulations.config import resolve_config
from simulations.results.schema import RunRecord
from simulations.results.statistics import final, mean_std
from simulations.results.tables import Table
from simulations.studies.paper import PAPER_ATTACKS, Verdicts, report, study
from simulations.study import Case, Runs
from tests.records import made_up

SEEDS = (1, 2, 3)


def cases(regimes: Sequence[str], seeds: Sequence[int] = SEEDS) -> list[Case]:
    given = ["--privacy", *regimes, "--seeds", *map(str, seeds)]
    return list(study.choose_cases(study.parser().parse_args(given)))


def overrides(name: str) -> str:
    (case,) = (c for c in cases(["low", "high"], [4]) if c.name == f"{name}_seed4")
    return " ".join([*case.overrides, "seed=4"])


def test_the_papers_runs_come_first_and_each_once() -> None:
    everything = cases(["low", "moderate", "high"], [1, 2, 3, 4, 5])
    own = ("mimic-shift", "strongest")
    paper = [
        case.labels
        for case in everything
        if case.labels["aggregation"] != "filter" and case.labels["attack"] not in own
    ]
    assert [case.labels for case in everything[:135]] == paper
    assert len({case.name for case in everything}) == len(everything) == 285
    assert sum(case.labels["attack"] in own for case in everything) == 90
    assert Counter(labels["privacy"] for labels in paper) == dict.fromkeys(
        ("low", "moderate", "high"), 45
    )
    low = [labels["attack"] for labels in paper if labels["privacy"] == "low"]
    assert Counter(low) == {"": 5} | dict.fromkeys(PAPER_ATTACKS, 10)


def test_the_papers_settings() -> None:
    config = resolve_config(overrides("high_foe_filter"))
    said = {
        "num_nodes": 7, "num_malicious_nodes": 3, "steps": 400, "momentum": 0.99,
        "server_learning_rate": 1.0, "weight_decay": 1e-4, "seed": 4,
    }  # fmt: skip
    assert said.items() <= config.items()
    plan = config["privacy"]["plan"]  # type: ignore[index]
    assert (plan["clip_norm"], plan["batch_size"]) == (1.0, 25)
    assert plan["noise_multiplier"] == 3.0
    # The benchmark is plain, and its honest clients are as many.
    plain = resolve_config(overrides("low_dp-dsgd"))
    expected = {"num_nodes": 4, "num_malicious_nodes": 0, "momentum": 0.0}
    assert expected.items() <= plain.items()
    assert "Average" in str(plain["aggregation"])


def make_runs(accuracy: float = 0.85) -> Runs[RunRecord]:
    return Runs(
        {
            case: made_up(
                accuracy + 0.001 * case.seed,
                (0.7, 0.6 if case.labels["attack"] == "strongest" else 0.3),
            )
            for case in cases(["low"])
        }
    )


def failing(runs: Runs[RunRecord]) -> list[str]:
    rows = Verdicts(runs).judge().rows
    return [f"{row[1]}: {row[0]}" for row in rows if row[2] != "holds"]


def change(
    runs: Runs[RunRecord],
    method: str,
    attack: str,
    accuracy: float = 0.85,
    loss: float = 0.3,
) -> Runs[RunRecord]:
    new = {
        case: made_up(accuracy + 0.001 * case.seed, (0.7, loss))
        for case in runs
        if (case.labels["aggregation"], case.labels["attack"]) == (method, attack)
    }
    assert new
    return Runs({**runs, **new})


def test_verdicts_follow_the_runs() -> None:
    runs = make_runs()
    assert failing(runs) == []
    assert [statement.partition(":")[2] for statement in failing(make_runs(0.79))] == [
        " Safe-DSHB, SMEA at low privacy: around 0.80, or more",
        " Safe-DSHB, Filter at low privacy: around 0.80, or more",
    ]
    # A rising loss of SMEA, and its accuracy: Filter is no longer alike.
    worse = failing(change(runs, "smea", "foe", accuracy=0.7, loss=0.8))
    assert worse == [
        "the paper: Safe-DSHB, SMEA at low privacy: around 0.80, or more",
        "the paper: the training loss falls under its four attacks: Safe-DSHB, SMEA",
        "ours: no attack leaves a higher loss than strongest: Safe-DSHB, SMEA",
        "ours: Filter's accuracy is SMEA's, within two errors",
    ]
    # What the paper does not say is not said in its name.
    (better,) = failing(change(runs, "filter", "alie", accuracy=0.95))
    assert better.startswith("ours: DP-DSGD is at least as good")
    rising = failing(change(runs, "filter", "foe", loss=0.8))
    assert rising == [
        "ours: the training loss falls under its four attacks: Filter, default stop",
        "ours: no attack leaves a higher loss than strongest: Filter, default stop",
    ]
    # The paper says nothing of colluders who search.
    (stopped,) = failing(change(runs, "smea", "strongest", loss=0.8))
    assert stopped.startswith("ours: it falls under mimic-shift and strongest, too")


def test_losses_that_the_paper_sees_match_are_compared() -> None:
    runs = make_runs()
    for case in runs:
        if case.labels["aggregation"] == "dp-dsgd":
            loss = 0.28 + 0.01 * case.seed
            runs[case] = made_up(0.85 + 0.001 * case.seed, (0.7, loss))
    (apart,) = failing(change(runs, "smea", "label-flip", loss=0.35))
    assert "ends where DP-DSGD's does" in apart
    assert failing(change(runs, "smea", "label-flip", loss=0.305)) == []
    # Under FOE the paper says nothing of the kind.
    assert failing(change(runs, "smea", "foe", loss=0.5)) == []


def test_regimes_degrade_and_foe_is_a_bit_lower_at_high_privacy_only() -> None:
    def runs(high: float, foe: float) -> Runs[RunRecord]:
        level = {"low": 0.9, "moderate": 0.85, "high": high}
        return Runs(
            {
                case: made_up(
                    foe
                    if case.has(attack="foe", privacy="high") and case.labels["attack"]
                    else level[case.labels["privacy"]],
                    (0.7, 0.3),
                )
                for case in cases(["low", "moderate", "high"], [1, 2])
            }
        )

    assert failing(runs(0.76, 0.7)) == []
    low = failing(runs(0.76, 0.6))
    (about,) = (s for s in low if "SMEA at high" in s)
    assert about.startswith("the paper: Safe-DSHB, SMEA at high privacy: a bit lower")
    level = failing(runs(0.85, 0.85))
    assert {s for s in level if "tightens" in s} == {
        "the paper: accuracy falls as privacy tightens: DP-DSGD, no attack",
        "the paper: accuracy falls as privacy tightens: Safe-DSHB, SMEA",
    }


def table_of(title: str, runs: Runs[RunRecord]) -> Table:
    (section,) = (one for one in report(runs) if one.title == title)
    assert section.table is not None
    return section.table


def test_a_loss_that_rises_is_told_with_its_panel_and_method() -> None:
    runs = make_runs()
    for case in runs:
        if case.labels["aggregation"] == "filter" and case.labels["attack"] == "foe":
            runs[case] = made_up(0.7, (0.693, 0.8))
    text = table_of("Statements of the paper, and ours", runs).markdown
    assert (
        "under its four attacks: Filter, default stop | ours | **does not hold** | "
        "rises at low privacy under FOE" in text
    )
    row = ["low", "FOE", *["0.700 to 0.300"] * 3, "**rises: 0.693 to 0.800**"]
    assert row in table_of("Training loss", runs).rows


def test_the_table_has_means_and_sample_deviations() -> None:
    found = final([made_up(0.85 + 0.001 * seed, (0.7, 0.3)) for seed in SEEDS])
    assert str(found) == "0.852 ± 0.001"
    assert str(mean_std([0.5])) == "0.500"  # one run has no spread
    table = table_of("Low privacy", make_runs())
    assert table.rows[0] == ["ALIE", *["0.852 ± 0.001"] * 4, "around 0.80"]


def test_without_some_method_the_others_are_told() -> None:
    runs = Runs(
        {c: r for c, r in make_runs().items() if c.labels["aggregation"] != "filter"}
    )
    assert failing(runs) == []
    assert table_of("Low privacy", runs).rows[0][-2:] == [
        "0.852 ± 0.001",
        "around 0.80",
    ]


def test_of_one_panel_no_statement_is_judged() -> None:
    runs = make_runs().where(attack="foe")
    assert "Statements of the paper, and ours" not in [s.title for s in report(runs)]

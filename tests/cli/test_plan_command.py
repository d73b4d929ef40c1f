"""`safedshb plan`: the paper's setting, targets, what-ifs and refusals."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from flwr_safedshb import theory
from flwr_safedshb.cli import main
from flwr_safedshb.cli._forecast import FederationSpec, forecast, list_alternatives

PAPER = "-n=7 -f=3 -m=2763 -d=69 -b=25 -C=1 -T=400 --delta=1e-4"
SMALL = "-n=5 -f=1 -m=500 -d=10 -b=500 -T=1 --delta=1e-6"


def planned(capsys: pytest.CaptureFixture[str], arguments: str, code: int = 0) -> str:
    assert main(["plan", *arguments.split()]) == code
    return capsys.readouterr().out


def told(
    capsys: pytest.CaptureFixture[str], arguments: str, code: int = 0
) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(planned(capsys, arguments + " --json", code))
    return found


def test_a_verdict_comes_first_and_theory_on_demand(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = " ".join(planned(capsys, PAPER + " -s 1").split())
    assert text.startswith("Noise: The noise leaves room to train: noise load 0.019")
    assert "Attackers: no 3 of 7 move an aggregate farther than 0.189" in text
    assert "epsilon 1.014 of one example at delta 0.0001, over all steps" in text
    assert "0.541 with poisson batches and the same noise" in text
    assert "noise multiplier 1 " in text
    assert "noise 0.08 " in text
    assert "kappa 12 " in text
    assert "lower bound" not in text
    theory = " ".join(planned(capsys, PAPER + " -s 1 --theory").split())
    assert theory.startswith(text.partition("--theory:")[0])
    # d/f = 69/3: privacy against what adversaries hide in its noise.
    assert "largest cause: privacy, 23 times the next" in theory
    assert "SMEA 12 (in the paper 48), Filter with a bound 9 (in the paper" in theory
    # Of the lower bound nothing is proven here, and each reason is named once.
    assert "Proven for yours: nothing." in theory
    assert "privacy: it needs epsilon <= 1/(4 sqrt(2 n ln(m+1))) = 0.0237" in theory
    assert theory.count("it needs delta < 1/(8 n m) = 6.46e-06") == 1
    assert theory.count("differ by G >= C = 1, and G is 0") == 1
    assert "all three at once: it needs an error rho of at most 0.01" in theory


def test_a_training_without_a_chance_is_said_first_and_ends_with_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = planned(capsys, PAPER + " --epsilon 1e-6", 1)
    verdict, others = " ".join(text.split()).split("Attackers:")
    assert verdict.startswith("Noise: WILL NOT TRAIN: noise load 1")
    assert "Any of these helps: " in verdict
    assert "examples in each node" in verdict
    assert "radius" in others
    found = told(capsys, PAPER + " --epsilon 1e-6", 1)["training"]
    assert found["verdict"] == "will not train"
    assert len(found["cures"]) >= 2


def test_no_attackers_to_withstand_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    text = planned(capsys, SMALL + " --epsilon 1 -f 0")
    assert "a single hostile client can ruin the model" in " ".join(text.split())


@pytest.mark.usefixtures("shipped_samplers")
def test_the_trilemma_page_shows_what_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "trilemma.md").read_text()
    (shown,) = re.findall(r"```text\n\$ safedshb plan (.*?)\n(.*?)\n```", page, re.S)
    assert planned(capsys, shown[0]).split() == shown[1].split()


def test_the_papers_setting_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, PAPER + " -s 1")
    assert found["privacy"]["noise_std"] == 0.08
    by_sampling = found["privacy"]["epsilon_by_sampling"]
    assert by_sampling["fixed"] == pytest.approx(1.0143, abs=5e-5)
    assert by_sampling["poisson"] == pytest.approx(0.5406, abs=5e-5)
    assert "replace-one adjacency, PLD accountant" in found["privacy"]["statement"]
    assert found["kappa"] == {
        "smea": 12.0, "smea_paper": 48.0, "filter": 9.0, "filter_paper": 85.5,
        "lower_bound": 3.0,
    }  # fmt: skip
    lower = found["lower_bound"]
    assert lower["privacy"] == pytest.approx(69 / (1.0143**2 * 7 * 2763**2), rel=1e-3)
    assert (lower["dominant"], lower["up_to"]) == (
        "privacy",
        "constants and logarithms",
    )
    assert len(lower["violated_assumptions"]) == 4
    assert lower["proven"] == []
    assert [len(x) for x in lower["violated_by_term"].values()] == [2, 1, 1]


def test_momentum_averages_the_noise(capsys: pytest.CaptureFixture[str]) -> None:
    still = told(capsys, PAPER + " -s 1 --momentum 0")
    moving = told(capsys, PAPER + " -s 1")  # 0.99
    assert still["privacy"]["momentum_noise_std"] == 0.08
    assert moving["privacy"]["momentum_noise_std"] == pytest.approx(0.08 / 199**0.5)
    for name in ("noise_spread", "privacy", "both", "sampling", "combined"):
        before, after = (
            found["smea_bound"].get(name, found.get(name)) for found in (still, moving)
        )
        assert before / after == pytest.approx(199.0)
    assert moving["noise_spread"] == pytest.approx(
        0.0064 / 199 * (1 + (69 / 4) ** 0.5) ** 2
    )
    # sqrt(12/199) (0.08 * 5.1533 + sqrt(2738/2762/25)).
    assert moving["stopping_radius"] == pytest.approx(0.15013, rel=1e-3)
    assert still["lower_bound"] == moving["lower_bound"]


def test_what_batches_add(capsys: pytest.CaptureFixture[str]) -> None:
    known = told(capsys, PAPER + " -s 1 --momentum 0 --gradient-std 0.5")
    bound = theory.batch_variance(0.5, 25, 2763)
    assert known["smea_bound"]["sampling"] == pytest.approx(
        (0.5 + 12**0.5) ** 2 * bound
    )
    whole = told(capsys, SMALL + " -s 4 --momentum 0")
    assert whole["smea_bound"]["sampling"] == 0.0


def test_what_is_proven_in_a_setting(capsys: pytest.CaptureFixture[str]) -> None:
    held = "-n=10 -f=2 -m=1000 -d=50 -b=1000 -T=1 --delta=1e-6 --epsilon=0.02"
    # What is proven is that nobody can train here, and so the command ends with 1.
    assert told(capsys, held, 1)["lower_bound"]["proven"] == ["privacy"]
    apart = told(capsys, held + " -G 1", 1)["lower_bound"]
    assert apart["proven"] == ["privacy", "both", "robustness"]
    assert len(apart["violated_assumptions"]) == 1
    text = " ".join(planned(capsys, held + " -G 1 --theory", 1).split())
    assert "Proven for yours: privacy, both, robustness." in text
    assert "all three at once: it needs an error rho" in text


def test_noise_is_calibrated_to_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, SMALL + " --epsilon 2 -G 0.01")
    assert 1.98 <= found["privacy"]["epsilon"] <= 2.0
    noise = found["privacy"]["noise_std"]
    assert noise == 2 * found["privacy"]["noise_multiplier"] / 500
    left = theory.noise_in_momentum(noise, 0.99)
    bound = theory.mean_estimation_bound(5, 1, 10, left, 4 / 3, 0.01)
    assert found["smea_bound"]["combined"] == pytest.approx(bound.combined)
    assert found["lower_bound"]["robustness"] == pytest.approx(1e-4 / 5)


@pytest.mark.usefixtures("shipped_samplers")
def test_what_if(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, SMALL + " --epsilon 1")
    changes = {row["change"]: row for row in found["what_if"]}
    assert list(changes) == [
        "n = 6", "n = 4", "f = 2", "f = 0", "momentum = 0.995", "m = 1000",
        "epsilon = 0.5", "epsilon = 2", "poisson batches", "T = 2", "rate = 0.5",
        "C = 0.5",
    ]  # fmt: skip
    # Lower bound: (d + f)/n.
    assert changes["n = 6"]["lower_bound_factor"] == pytest.approx(5 / 6)
    assert changes["f = 2"]["lower_bound_factor"] == pytest.approx(12 / 11)
    # Twice the examples at the same epsilon: a quarter, up to 1% of calibration.
    assert changes["m = 1000"]["lower_bound_factor"] == pytest.approx(0.25, rel=0.03)
    assert changes["epsilon = 2"]["lower_bound_factor"] == pytest.approx(0.25, rel=0.03)
    assert changes["f = 0"]["kappa"] == 0.0
    assert changes["f = 0"]["smea_bound_factor"] < 0.5
    assert changes["f = 0"]["stopping_radius"] == 0.0
    assert changes["momentum = 0.995"]["smea_bound_factor"] == pytest.approx(
        199 / 399, rel=1e-6
    )
    assert changes["epsilon = 0.5"]["noise_std"] > 1.7 * found["privacy"]["noise_std"]


def test_alternatives_can_all_be() -> None:
    # No f + 1 and no n - 1 where there would be no honest majority.
    spec = FederationSpec(
        3, 1, 50, 4, 50, 1, 1e-6, noise_multiplier=4.0, sampling="poisson", momentum=0.0
    )
    changes = [change for change, _ in list_alternatives(forecast(spec))]
    assert "n = 2" not in changes
    assert "f = 2" not in changes
    assert "fixed batches" in changes


def test_where_robustness_dominates(capsys: pytest.CaptureFixture[str]) -> None:
    text = planned(capsys, SMALL + " --epsilon 1 -G 0.5 --theory")
    assert "largest cause: robustness" in text
    assert "It is robustness once" not in text
    alone = planned(capsys, SMALL + " --epsilon 1 -f 0 --theory")
    assert "privacy, the only cause." in alone


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("-f 3", "f=3 needs n > 2f, got n=5; lower f to at most 2"),
        ("-b 501", "batch_size=501 needs at least as many examples, got"),
        ("--epsilon 0", "target_epsilon=0.0 must be positive"),
        ("--epsilon -1", "target_epsilon=-1.0 must be positive"),
        ("--epsilon nan", "target_epsilon=nan must be positive"),
        ("-d 0", "d=0 must be finite and above 0"),
        ("--delta 2", "delta=2.0 must lie in"),
        ("-G -1", "heterogeneity=-1.0 must be finite and at least 0"),
        ("-T 0", "steps=0 must be at least 1"),
        ("--momentum 1", "momentum=1.0 must lie in [0, 1)"),
        ("--gradient-std -1", "gradient_std=-1.0 must be finite"),
    ],
)
def test_what_cannot_be_is_refused_with_its_bound(
    capsys: pytest.CaptureFixture[str], changed: str, words: str
) -> None:
    assert main(f"plan {SMALL} --epsilon 1 {changed}".split()) == 2
    found = capsys.readouterr()
    assert words in found.err
    assert not found.out


def test_no_noise_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"plan {SMALL} -s 0".split()) == 2
    assert "noise_multiplier=0.0 gives no privacy" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more", ["", "--epsilon 1 -s 1", "--epsilon one", "-n 2.5 -s 1"]
)
def test_a_command_that_is_not_understood(more: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(f"plan {SMALL} {more}".split())
    assert stopped.value.code == 2


def test_it_says_whether_a_training_withstands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not what it would be otherwise: that takes longest, and is tested above.
    monkeypatch.setattr("flwr_safedshb.cli.plan.list_alternatives", lambda now: [])
    assert told(capsys, PAPER + " -s 1")["withstands"] is None
    task = " --signal 0.064 --distance 12.6"
    low, middle, high = (
        told(capsys, PAPER + f" -s {s}" + task) for s in (0.01, 0.3, 3)
    )
    assert low["withstands"] == "will withstand"
    assert middle["withstands"] == "cannot say"
    assert high["withstands"] == "will not withstand"
    # The same push, for longer steps than the way has room for.
    far = told(capsys, PAPER + " -s 0.01 --learning-rate 30" + task)
    assert far["push_radius"] == low["push_radius"]
    assert far["withstands"] == "will not withstand"
    slow = told(capsys, PAPER + " -s 0.01 --learning-rate 30 --decay linear" + task)
    assert slow["withstands"] != "will withstand"
    main(["plan", *PAPER.split(), "-s", "3", *task.split()])
    printed = " ".join(capsys.readouterr().out.split())
    assert "Attackers: will not withstand" in printed
    assert "Better than alone? unlikely" in printed
    assert main(["plan", *PAPER.split(), "-s", "1", "--signal", "1"]) == 2
    assert "distance=None need each other" in capsys.readouterr().err


def test_what_ifs_vary_the_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    small = "-n 5 -f 1 -m 100 -d 5 -b 50 -T 4 --delta 1e-4 --epsilon 3 --momentum 0.5"
    found = told(capsys, small + " --signal 0.2 --distance 2 --learning-rate 2")
    changes = {one["change"]: one for one in found["what_if"]}
    assert {"b = 100", "T = 2", "T = 8", "rate = 1", "C = 0.5"} <= changes.keys()
    assert changes["b = 100"]["push_radius"] < found["push_radius"]
    assert changes["C = 0.5"]["push_radius"] == pytest.approx(found["push_radius"] / 2)
    assert all(one["withstands"] for one in changes.values())


def test_answers_cost_and_are_as_precise_as_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flwr_safedshb.cli.plan.list_alternatives", lambda now: [])
    common = ["plan", "-n", "7", "-f", "2", "-m", "500", "-d", "5", "-b", "25"]
    common += ["-T", "100", "--delta", "1e-4", "-s", "1", "--evaluations", "5"]
    assert main([*common, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    costs = [one["epsilon"] for one in found["evaluations"]]
    assert costs == sorted(costs, reverse=True)
    assert min(costs) > found["privacy"]["epsilon"]
    assert [one["deviation"] for one in found["evaluations"]] == pytest.approx(
        [0.02, 0.05, 0.1, 0.2]
    )
    # Set aside, they cost the larger of the two, and not the sum.
    assert main([*common, "--held-out", "100", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["evaluations"]
    assert one["epsilon"] == pytest.approx(found["privacy"]["epsilon"], rel=1e-9)
    assert main(common) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "5 private answers about 500 examples" in text
    assert "not the accuracy over all examples" in text
    assert "f >= n/3" not in text
    common[common.index("-f") + 1] = "3"
    assert main(common) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "With f >= n/3 liars alone can move either end to 0 or 1" in text
    for wrong in (["--evaluations", "0"], ["--held-out", "-1"]):
        assert main([*common, *wrong]) != 0
        assert wrong[0].strip("-").replace("-", "_") in capsys.readouterr().err

"""The yardstick: its setting, its units, and both tables side by side."""

from pathlib import Path

import pytest

from flwr_safedshb.privacy.accounting import baselines
from flwr_safedshb.privacy.plan import PrivacyPlan
from simulations.config import composed
from simulations.models import MLP
from simulations.studies.yardstick import __main__ as yardstick
from simulations.studies.yardstick.cases import ATTACKS, NOISES, Case, cases
from tests.records import made_up


@pytest.mark.parametrize("epsilon", [0.125, 2.0])
def test_the_noise_is_that_of_the_papers_epsilon(epsilon: float) -> None:
    plan = PrivacyPlan(1.0, NOISES[epsilon], 16, 3000, "poisson", "add-remove")
    found = baselines.rdp(plan, 1500, 1.497e-4).epsilon
    assert epsilon * 0.995 < found <= epsilon * 1.0005


def test_the_setting_is_the_papers() -> None:
    cfg = composed(" ".join(Case(2.0, "SMEA", "label flip", 1).overrides))
    assert (cfg.num_nodes, cfg.num_malicious_nodes, cfg.steps) == (33, 13, 1500)
    assert (cfg.privacy.plan.sampling, cfg.privacy.plan.batch_size) == ("poisson", 16)
    model = MLP(784, 10, list(cfg.model.hidden))
    assert sum(p.numel() for p in model.parameters()) == 25_450


def test_each_run_once_and_nobody_attacks_once_only() -> None:
    everything = list(cases([*NOISES], ["SMEA", "Filter"], [*ATTACKS], [1, 2, 3]))
    assert len(everything) == len({case.name for case in everything}) == 15 * 7


def test_both_tables_are_side_by_side() -> None:
    runs = {
        case: made_up(0.7, (2.3, 0.9), case.seed)
        for case in cases([0.5, 2.0], ["SMEA"], ["no attack", "strongest"], [1, 2])
    }
    text = yardstick.markdown(runs)
    assert "| Xiang et al. | no attack | 0.775 | 0.800 |" in text
    assert "| Safe-DSHB, average | no attack | 0.700 ± 0.000 (-0.075) |" in text
    assert "| Safe-DSHB, SMEA | strongest | 0.700 ± 0.000 (-0.060) |" in text
    assert "| 2 | 0.792 | 1.55" in text  # their unit, and ours


def test_without_the_data_it_says_what_to_do(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(yardstick, "fashion_mnist", lambda: None)
    with pytest.raises(SystemExit):
        yardstick.main(["--output", str(tmp_path)])
    assert "dataset-fashion-mnist" in capsys.readouterr().err

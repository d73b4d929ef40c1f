"""What a run's privacy card says, and that it claims no more than is known."""

import json
from pathlib import Path

import pytest
from flwr.app import MetricRecord, RecordDict
from omegaconf import OmegaConf

from flwr_safedshb.aggregation import SMEA, Filter, Median
from flwr_safedshb.algorithm.privacy_card import privacy_card
from flwr_safedshb.algorithm.wire import MOMENTUM_TAG
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.strategy import SafeDSHB
from tests.federation import Spoil, federation, model
from tests.replies import Layers, record

PLAN = PrivacyPlan(1.0, 1.0, 25, 2763)


def stating(epsilons: list[float]) -> Spoil:
    """Return nodes of which the first ones state these epsilons."""

    def spoil(partition: int, step: int, layers: Layers) -> RecordDict:
        content = record(list(layers))
        tag = MetricRecord({MOMENTUM_TAG: 1})
        if partition < len(epsilons):
            tag["epsilon"], tag["delta"] = epsilons[partition], 1e-5
        content["metrics"] = tag
        return content

    return spoil


def test_a_run_leaves_its_card_beside_its_model(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    grid = federation(7, stating([0.5, 0.5, 9.0]))
    result = SafeDSHB(SMEA(), 2, checkpoint=path).start(grid, model(), 3)
    found = json.loads((tmp_path / "model.privacy.json").read_text())
    assert result.card is not None
    assert found == json.loads(json.dumps(result.card.to_dict()))
    stated = found["stated_by_nodes"]
    assert stated["epsilon"] == 9.0
    assert stated["epsilons"] == [0.5, 0.5, 9.0]
    assert (len(stated["nodes"]), stated["replies"]) == (3, 7)
    robustness = found["robustness"]
    assert robustness["num_malicious_nodes"] == 2
    assert robustness["kappa"] == pytest.approx(4 * 2 / 3)
    assert (robustness["rounds"], robustness["skipped_rounds"]) == (3, 0)
    # Nobody told the server of plan, unit or noise.
    assert found["plan"] is None
    assert found["noise"] == "unknown"
    text = (tmp_path / "model.privacy.md").read_text()
    assert "| epsilon, of this run alone | 0.5 to 9 | 3 of 7 nodes, unproven |" in text
    assert "| unit, adjacency, accountant, plan | not known | nobody |" in text


def test_a_card_without_statements_claims_no_epsilon() -> None:
    card = SafeDSHB().start(federation(3), model(), 1).card
    assert card is not None
    assert card.to_dict()["stated_by_nodes"]["epsilon"] is None  # type: ignore[index]
    assert "No node stated an epsilon" in card.to_markdown()


def test_what_the_app_knows_is_added_under_its_own_name() -> None:
    card = SafeDSHB().start(federation(3), model(), 1).card
    assert card is not None
    statement = PLAN.statement(400, 1e-4)
    full = privacy_card(card, PLAN, statement, noise="seeded", not_covered=("Luck.",))
    said = full.to_dict()["plan"]
    assert said["statement"]["epsilon"] == pytest.approx(1.0143, abs=1e-4)  # type: ignore[index]
    assert said["unit"] == "one example (replace-one)"  # type: ignore[index]
    text = full.to_markdown()
    assert "protects nobody" in text
    assert "- Luck." in text
    # The front matter is that of a model card on the Hugging Face Hub.
    _, front, _ = text.split("---\n", 2)
    tags = OmegaConf.select(OmegaConf.create(front), "tags")
    assert "differential-privacy" in tags
    with pytest.raises(ValueError, match="noise='quiet' must be one of"):
        privacy_card(card, noise="quiet")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "kind"), [(Median(), "variance"), (Filter(), "spectral")]
)
def test_kappa_comes_with_its_unit(rule: Median | Filter, kind: str) -> None:
    card = SafeDSHB(rule, 1).start(federation(7), model(), 2).card
    assert card is not None
    assert card.robustness.kappa_kind == kind
    assert card.robustness.kappa is not None


def test_settings_that_weaken_the_guarantee_are_named() -> None:
    strategy = SafeDSHB(foreign_clients=True, fraction_evaluate=0.5)
    card = strategy.start(federation(3), model(), 1).card
    assert card is not None
    assert any("foreign_clients=True" in line for line in card.not_covered)
    assert any("fraction_evaluate=0.5" in line for line in card.not_covered)

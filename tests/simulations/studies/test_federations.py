"""What a federation needs: which runs, and what is made of them."""

from pathlib import Path

import pytest

from simulations.check import check
from simulations.config import composed
from simulations.data import files
from simulations.studies.federations.__main__ import markdown
from simulations.studies.federations.parts import PARTS, Case, cases
from tests import records


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fashion-MNIST is not on this machine."""
    monkeypatch.setattr(files, "DEBIAN_FASHION_MNIST", str(tmp_path / "none"))
    monkeypatch.delenv("SAFEDSHB_DATA", raising=False)


def test_every_run_is_there_once() -> None:
    everything = list(cases([*PARTS], [1, 2]))
    assert len(everything) == len({case.name for case in everything}) == 2 * 84
    texts = {" ".join(case.overrides) for case in everything}
    assert len(texts) == len(everything)


def test_who_is_there_if_nobody_attacks() -> None:
    """Sizes are of honest nodes: without an adversary there is one node less."""
    for row, honest in (("with the small node", 5), ("without it", 4)):
        for attack, hostile in (("nobody", 0), ("foe", 1)):
            case = Case("unequal", row, attack, "smea", 1)
            cfg = composed(" ".join(case.overrides))
            assert cfg.num_nodes == honest + hostile
            assert cfg.num_malicious_nodes == 1
            assert len(cfg.split.sizes) == honest


def test_the_tables_have_every_figure() -> None:
    runs = {
        case: records.made_up(0.5 + case.seed / 10, (0.7, 0.3), seed=case.seed)
        for case in cases([*PARTS], [1, 2])
    }
    text = markdown(runs)
    assert "2 seeds." in text
    assert text.count("0.650 ± 0.071") == 4 * 9 + 4 * 12 + 4 * 6
    assert "smea, last | smea, mean" in text


@pytest.mark.federation
def test_what_is_asked_for_can_run() -> None:
    case = Case("local-steps", "paper, low privacy", "foe", "K = 10", 1)
    check(" ".join([*case.overrides, "data=synthetic"]))

"""Every constant against an optimiser over inputs."""

from pathlib import Path

import numpy as np
import pytest

from flwr_safedshb.aggregation import SMEA, Average, Filter, filter
from flwr_safedshb.theory import (
    filter_eta_paper,
    kappa_filter,
    kappa_lower_bound,
    kappa_smea,
)
from simulations.studies import constants
from simulations.studies.constants import Claim, attack, claims, pairs


@pytest.mark.federation
@pytest.mark.parametrize("claim", list(claims()), ids=lambda claim: claim.name)
def test_no_vectors_are_above_a_constant(claim: Claim) -> None:
    tried = 0
    for n, f in pairs(9):
        found = attack(claim, n, f, starts=4, steps=12)
        if found is None:
            continue
        tried += 1
        assert 0 < found.best <= found.proven * (1 + 1e-9), found
        own = claim.name.endswith("own")
        # No rule is below the limit, and the example that shows it is a start.
        assert own or found.best >= 0.999 * kappa_lower_bound(n, f)
    assert tried == (8 if claim.name.endswith("n/3") else 14)


@pytest.mark.federation
def test_smea_attains_its_constant() -> None:
    (claim,) = (claim for claim in claims() if claim.name == "SMEA, spectral")
    for n, f in pairs(9):
        found = attack(claim, n, f, starts=1, steps=0)
        assert found is not None
        assert found.best >= 0.999 * kappa_smea(n, f)


def test_the_optimiser_finds_what_is_wrong() -> None:
    """A constant that is too small, and a rule that is not robust at all."""
    (smea,) = (claim for claim in claims() if claim.name == "SMEA, spectral")
    wrong = Claim("", lambda n, f: 0.9 * kappa_smea(n, f), smea.error)
    found = attack(wrong, 7, 2, starts=2, steps=20)
    assert found is not None
    assert found.best > found.proven
    average = Claim("", lambda n, f: 50.0, constants._error(Average(), spectral=True))
    found = attack(average, 7, 2, starts=4, steps=200)
    assert found is not None
    assert found.best > 50.0
    # And what it reports is what the vectors do.
    error = np.sum((found.vectors.mean(axis=0) - found.vectors[2:].mean(axis=0)) ** 2)
    spread = np.linalg.eigvalsh(np.atleast_2d(np.cov(found.vectors[2:].T, bias=True)))
    assert found.best == pytest.approx(error / spread[-1])


def test_the_papers_stop_has_the_constant_that_goes_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """45 at (7, 3): f eta/(n-f) + f/(n-2f) holds for every eta of 2(n-f)/(n-2f) on."""
    monkeypatch.setattr(filter, "filter_eta", filter_eta_paper)
    claim = Claim(
        "", lambda n, f: kappa_filter(n, f, filter_eta_paper(n, f)), constants._bounded
    )
    for n, f in pairs(9):
        found = attack(claim, n, f, starts=4, steps=40)
        assert found is not None
        assert found.best <= found.proven
    # Which is more than the constant of the smaller stop.
    assert Filter(1.0).kappa(7, 3) == 9.0


@pytest.mark.federation
def test_the_command_prints_the_distance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "constants.md"
    arguments = ["--largest", "5", "--starts", "2", "--steps", "2", "--out", str(out)]
    assert constants.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "constants attacked, 0 broken" in printed
    assert out.read_text() in printed
    row = next(r for r in printed.splitlines() if r.startswith("| SMEA, spectral | 5"))
    assert row.split(" | ")[1:4] == ["5", "1", f"{SMEA().kappa(5, 1):.4g}"]


def test_a_broken_constant_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smea = next(claims())
    broken = Claim("half", lambda n, f: 0.5 * kappa_smea(n, f), smea.error)
    monkeypatch.setattr(constants, "claims", lambda: iter([broken]))
    arguments = ["--largest", "5", "--starts", "1", "--steps", "0"]
    assert constants.main([*arguments, "--out", str(tmp_path / "x.md")]) == 1

"""Mean estimation under attack: the colluders that the study adds to the library's."""

import numpy as np

from flwr_safedshb.aggregation import SMEA, Median
from flwr_safedshb.attacks import ALIE, FOE
from simulations.studies.trilemma.points import ATTACKS, shifted_copies


def test_shifted_copies_move_smea_farther_than_shifted_means() -> None:
    rng = np.random.default_rng(0)
    honest = rng.normal(size=(5, 60))
    mean = honest.mean(axis=0)

    def harm(sent: np.ndarray) -> float:
        out = SMEA()(np.concatenate((honest, sent)), 2)
        return float(np.square(out - mean).sum())

    found = harm(shifted_copies(honest, 2, rng, SMEA()))
    for attack in (ALIE(), FOE()):
        assert found > 1.5 * harm(attack(honest, 2, rng, SMEA()))
    # And never farther than is proven.
    top = np.linalg.eigvalsh(np.cov(honest.T, bias=True))[-1]
    assert found <= SMEA().kappa(7, 2) * top


def test_all_colluders_send_one_finite_vector() -> None:
    rng = np.random.default_rng(1)
    for h, f, d in ((4, 3, 69), (16, 4, 8), (2, 1, 1)):
        sent = shifted_copies(rng.normal(size=(h, d)), f, rng, Median())
        assert sent.shape == (f, d)
        assert np.isfinite(sent).all()
        assert (sent == sent[0]).all()
    assert ATTACKS["shifted copies"] is shifted_copies

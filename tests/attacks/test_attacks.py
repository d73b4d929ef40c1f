"""Attacks: each against its definition, the search against plain re-aggregation."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import kstest

from flwr_safedshb import attacks
from flwr_safedshb.aggregation import (
    CAF,
    MDA,
    NNM,
    SMEA,
    Average,
    Filter,
    GeometricMedian,
    GramRule,
    Krum,
    Median,
    MultiKrum,
    Rule,
    TrimmedMean,
    Weighing,
)
from flwr_safedshb.aggregation.rule import Clients, FloatArray
from flwr_safedshb.attacks import (
    ALIE,
    FOE,
    TAUS,
    Aggregate,
    Attack,
    FarCluster,
    Gaussian,
    HugeNorm,
    LabelFlip,
    Mimic,
    MinMax,
    MinSum,
    NonFinite,
    SearchedAttack,
    SignFlip,
    Strongest,
    Zero,
    damage_by_tau,
    most_damaging_tau,
)
from tests.configured import configured
from tests.oracles import Floats

if TYPE_CHECKING:
    from flwr_safedshb.simulation.adversarial import AttackFunction

AnyFloats = NDArray[np.floating]

ATTACKS: "list[AttackFunction]" = [
    ALIE(),
    FOE(),
    SignFlip(),
    Zero(),
    Gaussian(),
    NonFinite(),
    HugeNorm(),
    FarCluster(),
    Mimic(),
    MinMax(),
    MinSum(),
]
# Whoever adds a file to conf/ has added its attack to these tests.
ATTACKS += [
    attack
    for attack in configured("attack")
    if isinstance(attack, Attack)
    and attack.replaces_vectors
    and type(attack) not in set(map(type, ATTACKS))
]
RULES: list[Rule] = [
    SMEA(),
    Filter(),
    Filter(min_mass=0.0),
    CAF(),
    Average(),
    Krum(),
    MultiKrum(),
    GeometricMedian(),
    MDA(),
    NNM(GeometricMedian()),
    Median(),
    TrimmedMean(),
    NNM(Median()),
]
every_attack = pytest.mark.parametrize("attack", ATTACKS, ids=str)
every_rule = pytest.mark.parametrize("rule", RULES, ids=str)
searched = pytest.mark.parametrize("attack", [ALIE(), FOE()], ids=["ALIE", "FOE"])


def vectors(h: int = 4, d: int = 6, seed: int = 0) -> Floats:
    """Honest vectors that have a mean and a spread."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(h, d)) * rng.uniform(0.2, 2.0, size=d) + rng.normal(size=d)


def send(attack: "AttackFunction", honest: Floats, f: int, seed: int = 0) -> Floats:
    return attack(honest, f, np.random.default_rng(seed), SMEA()).astype(np.float64)


def is_shipped(attack: "AttackFunction") -> bool:
    """Say if an attack is a part of the package; what others add may do as it likes."""
    return type(attack).__name__ in attacks.__all__


def plain(rule: Rule) -> Aggregate:
    """The same rule as a callable of which nothing is known."""
    return lambda vectors, f: rule(vectors, f)


# What every attack has in common


@every_attack
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_sends_f_vectors_in_the_dtype_of_the_honest(
    attack: Attack, dtype: type[np.floating]
) -> None:
    for f in (0, 1, 3):
        honest = vectors().astype(dtype)
        honest.setflags(write=False)
        sent = attack(honest, f, np.random.default_rng(0), SMEA())
        assert sent.shape == (f, 6)
        assert sent.dtype == dtype
        sent[...] = 1.0  # the caller's own, and not one row seen f times


@every_attack
def test_randomness_comes_from_the_generator_alone(attack: Attack) -> None:
    honest = vectors()
    np.testing.assert_array_equal(send(attack, honest, 3), send(attack, honest, 3))
    other = np.array_equal(send(attack, honest, 3), send(attack, honest, 3, 1), True)
    random = isinstance(attack, Gaussian | NonFinite | HugeNorm | FarCluster)
    assert not is_shipped(attack) or other == (not random)


@every_attack
def test_attacks_that_hide_send_one_vector(attack: Attack) -> None:
    sent = send(attack, vectors(), 3)
    same = np.array_equal(sent, sent[[0, 0, 0]])
    spreads = Gaussian | NonFinite | HugeNorm | FarCluster | Strongest
    assert not is_shipped(attack) or same or isinstance(attack, spreads)
    assert not same or not isinstance(attack, Gaussian | FarCluster)


@every_attack
def test_refuses_what_are_no_honest_vectors(attack: Attack) -> None:
    rng = np.random.default_rng(0)
    for shape in ((3,), (0, 3), (3, 0), (2, 3, 4)):
        with pytest.raises(ValueError, match=r"honest has shape .* \(h, d\)"):
            attack(np.zeros(shape), 1, rng, SMEA())
    with pytest.raises(ValueError, match="honest has dtype int64"):
        attack(np.zeros((3, 2), np.int64), 1, rng, SMEA())
    with pytest.raises(ValueError, match="f=-1 must be at least 0"):
        attack(vectors(), -1, rng, SMEA())


# ALIE, FOE: definitions


def test_alie_adds_deviations() -> None:
    honest = vectors()
    expected = []
    for column in honest.T.tolist():
        mean = sum(column) / len(column)
        variance = sum((x - mean) ** 2 for x in column) / len(column)
        expected.append(mean + 1.7 * math.sqrt(variance))
    for row in send(ALIE(taus=[1.7]), honest, 2):
        np.testing.assert_allclose(row, expected, rtol=1e-12)


def test_foe_takes_means_away() -> None:
    honest = vectors()
    mean = [sum(column) / len(column) for column in honest.T.tolist()]
    for row in send(FOE(taus=[3.5]), honest, 2):
        np.testing.assert_allclose(row, [x - 3.5 * x for x in mean], rtol=1e-12)


def test_sign_flip_is_foe_at_two() -> None:
    honest = vectors()
    sent = send(SignFlip(), honest, 2)
    np.testing.assert_allclose(sent, send(FOE(taus=[2.0]), honest, 2), rtol=1e-12)
    np.testing.assert_allclose(sent[0], -honest.sum(axis=0) / 4, rtol=1e-12)


# ALIE, FOE: the search


def transcribed(attack: SearchedAttack, honest: Floats, f: int, rule: Rule) -> Floats:
    """||F(honest, B x f) - mean|| for every tau, as the paper writes it."""
    mean = honest.mean(axis=0)
    b = honest.std(axis=0) if isinstance(attack, ALIE) else -mean
    distances = []
    for tau in attack.taus:
        hostile = [mean + tau * b] * f
        output = rule(np.array([*honest, *hostile]), f)
        distances.append(np.sqrt(np.sum((output - mean) ** 2)))
    return np.array(distances)


@every_rule
@searched
@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=st.integers(0, 100_000))
def test_search_finds_the_worst_of_the_grid(
    rule: Rule, attack: SearchedAttack, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    h = int(rng.integers(3, 7))
    # Of an even number of mixed vectors, two halves can tie for the median.
    f = h - 1 if isinstance(rule, NNM) else int(rng.integers(1, h))
    d = int(rng.integers(3, 12))
    honest = vectors(h, d, seed)
    distances = transcribed(attack, honest, f, rule)
    fast = damage_by_tau(honest, attack.direction(honest), f, rule)
    np.testing.assert_allclose(fast, distances, rtol=1e-6, atol=1e-9)
    worst = TAUS[int(np.argmax(distances >= distances.max() - 1e-9))]
    mean, b = honest.mean(axis=0), attack.direction(honest)
    for row in attack(honest, f, rng, rule):
        np.testing.assert_allclose(row, mean + worst * b, rtol=1e-12, atol=1e-12)


@every_rule
@searched
def test_damage_by_weights_equals_damage_by_aggregation(
    rule: Rule, attack: SearchedAttack
) -> None:
    honest = vectors(d=69)
    b, f = attack.direction(honest), 3
    by_weights, by_vectors = (
        damage_by_tau(honest, b, f, rule),
        damage_by_tau(honest, b, f, plain(rule)),
    )
    np.testing.assert_allclose(by_weights, by_vectors, rtol=1e-9, atol=1e-12)
    tau = most_damaging_tau(honest, b, f, rule)
    assert tau == most_damaging_tau(honest, b, f, plain(rule))


def test_the_worst_tau_is_inside_the_grid_for_robust_rules() -> None:
    """The worst tau lies inside the grid for robust rules, at its end for the mean."""
    honest = vectors(d=69)
    for attack in (ALIE(), FOE()):
        b = attack.direction(honest)
        inner = {most_damaging_tau(honest, b, 3, rule) for rule in (SMEA(), Filter())}
        assert all(TAUS[0] < tau < TAUS[-1] for tau in inner)
        assert most_damaging_tau(honest, b, 3, Average()) == TAUS[-1]
    np.testing.assert_allclose(np.log10(TAUS), np.arange(-8, 9) / 8, atol=1e-12)


class Weighed(GramRule):
    """All weight on the adversaries; refuses to see a vector."""

    def weigh(self, gram: FloatArray, f: int) -> Weighing:
        weights = np.zeros(len(gram))
        weights[len(gram) - f :] = 1.0 / f
        return Weighing(weights, subset=None, lambda_max=0.0)

    def aggregate(self, clients: Clients, f: int) -> tuple[list[AnyFloats], None]:
        raise AssertionError("a Gram rule was given vectors")


class MixedWeighed(NNM):
    """NNM that refuses to see a vector."""

    def aggregate(self, clients: Clients, f: int) -> tuple[list[AnyFloats], None]:
        raise AssertionError("a Gram rule was given vectors")


def test_a_gram_rule_never_sees_a_vector() -> None:
    honest = vectors()
    b = honest.std(axis=0)
    expected = np.array(TAUS) * np.linalg.norm(b)
    np.testing.assert_allclose(
        damage_by_tau(honest, b, 3, Weighed()), expected, rtol=1e-12
    )
    assert damage_by_tau(honest, b, 3, MixedWeighed(Krum())).shape == (17,)


@pytest.mark.parametrize("rule", [SMEA(), Filter(), Krum(), Median()], ids=str)
def test_a_common_offset_changes_nothing(rule: Rule) -> None:
    # On a lattice the shift is exact, and so is the mean of four.
    honest = np.round(vectors(d=20) * 64) / 64
    b = honest.std(axis=0)
    moved = damage_by_tau(honest + 2.0**30, b, 3, rule)
    np.testing.assert_allclose(
        moved, damage_by_tau(honest, b, 3, rule), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("rule", [SMEA(), Krum(), Median(), TrimmedMean()], ids=str)
def test_of_equally_damaging_taus_the_smallest_is_taken(rule: Rule) -> None:
    """Far enough out, SMEA rejects every tau and the others no longer notice."""
    honest = vectors() + 1e3
    far = (1e4, 2e4, 3e4, 7e4)
    for aggregate in (rule, plain(rule)):
        b = np.ones(6)
        assert most_damaging_tau(honest, b, 3, aggregate, far) == 1e4
        largest = most_damaging_tau(honest, b, 3, aggregate, (1e-3, *far))
        assert largest == (1e-3 if isinstance(rule, SMEA) else 1e4)


@pytest.mark.parametrize(
    ("moves", "worst"),
    [
        ([1.0, 2.0, 2.0 * (1 + 1e-12)], 1),
        ([1.0, 2.0, 2.0 * (1 + 1e-6)], 2),
        ([0.0, 5e-15, 1e-14], 0),
        ([0.0, 1e-14, 1e-6], 2),
    ],
)
def test_round_off_is_not_damage(moves: list[float], worst: int) -> None:
    honest = vectors() + 1.0
    left = iter(moves)

    def moved(vectors: AnyFloats, f: int) -> AnyFloats:
        step = np.zeros(6)
        step[0] = next(left) * np.linalg.norm(honest, axis=1).max()
        return np.asarray(honest.mean(axis=0) + step)

    taus = (1.0, 2.0, 3.0)
    assert most_damaging_tau(honest, np.ones(6), 3, moved, taus) == taus[worst]


def test_smea_that_rejects_all_is_unharmed() -> None:
    honest = vectors(h=6)
    assert damage_by_tau(honest, np.ones(6), 3, SMEA(), (50.0, 99.0)).tolist() == [
        0.0,
        0.0,
    ]


def test_no_number_is_the_worst_aggregate() -> None:
    honest = vectors()

    def fragile(vectors: AnyFloats, f: int) -> AnyFloats:
        mean = np.asarray(vectors.mean(axis=0))
        return mean * np.nan if 1.0 < vectors[-1, 0] < 2.0 else mean

    b = np.ones(6)
    taus = np.array([0.5, 1.5, 9.0]) - honest.mean(axis=0)[0]
    assert most_damaging_tau(honest, b, 3, fragile, taus.tolist()) == taus[1]


def test_a_callable_may_spoil_its_input() -> None:
    honest = vectors()

    def spoiler(vectors: AnyFloats, f: int) -> AnyFloats:
        mean = np.asarray(vectors.mean(axis=0))
        vectors[:] = np.nan
        return mean

    b = honest.std(axis=0)
    expected = damage_by_tau(honest, b, 3, Average())
    np.testing.assert_allclose(
        damage_by_tau(honest, b, 3, spoiler), expected, rtol=1e-9
    )


@searched
def test_equal_vectors_and_a_zero_mean_are_sent_back(attack: SearchedAttack) -> None:
    equal = np.full((4, 3), 2.5) if isinstance(attack, ALIE) else np.zeros((4, 3))
    np.testing.assert_array_equal(send(attack, equal, 3), equal[:3])


@searched
def test_bad_taus_and_honest_vectors_are_refused(attack: SearchedAttack) -> None:
    kind = type(attack)
    for taus in ([], [1.0, np.nan], [np.inf]):
        with pytest.raises(ValueError, match="must be one or more finite numbers"):
            kind(taus=taus)
    for taus in ([2.0, 1.0], [1.0, 1.0]):
        with pytest.raises(ValueError, match="must increase"):
            kind(taus=taus)
    spoilt = vectors()
    spoilt[1, 2] = np.inf
    with pytest.raises(ValueError, match="honest holds NaN or infinity"):
        send(attack, spoilt, 3)
    with pytest.raises(ValueError, match="f=4 needs n > 2f, got n=8"):
        send(attack, vectors(), 4)


# Hidden among the honest


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 100_000))
def test_mimic_copies_who_stands_out_along_the_largest_variance(seed: int) -> None:
    honest = vectors(5, 8, seed)
    centred = honest - honest.mean(axis=0)
    z = np.linalg.eigh(centred.T @ centred)[1][:, -1]
    chosen = max(range(5), key=lambda i: abs(float(z @ centred[i])))
    np.testing.assert_array_equal(send(Mimic(), honest, 2), honest[[chosen, chosen]])


def bound_holds(attack: Attack, honest: Floats, sent: Floats) -> bool:
    squares = [float(np.sum((sent - x) ** 2)) for x in honest]
    pairs = [[float(np.sum((x - y) ** 2)) for y in honest] for x in honest]
    if isinstance(attack, MinMax):
        return max(squares) <= max(map(max, pairs))
    return sum(squares) <= max(map(sum, pairs))


@pytest.mark.parametrize("attack", [MinMax(), MinSum()], ids=str)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 100_000), h=st.integers(2, 7))
def test_bounded_attacks_go_to_their_bound(attack: Attack, seed: int, h: int) -> None:
    honest = vectors(h, 8, seed)
    mean, deviation = honest.mean(axis=0), honest.std(axis=0)
    (sent,) = send(attack, honest, 1)
    gammas = (mean - sent) / deviation
    gamma = gammas[0]
    assert gamma > 0
    np.testing.assert_allclose(gammas, gamma, rtol=1e-9)
    assert bound_holds(attack, honest, mean - gamma * (1 - 1e-6) * deviation)
    assert not bound_holds(attack, honest, mean - gamma * (1 + 1e-6) * deviation)


@pytest.mark.parametrize("attack", [MinMax(), MinSum(), Mimic()], ids=str)
def test_attacks_that_hide_copy_equal_honest_vectors(attack: Attack) -> None:
    for h in (1, 3):
        honest = np.full((h, 2), 0.75)
        np.testing.assert_array_equal(send(attack, honest, 2), np.full((2, 2), 0.75))


# In the open


def test_zero_sends_zeros() -> None:
    np.testing.assert_array_equal(send(Zero(), vectors(), 2), np.zeros((2, 6)))


def test_gaussian_has_its_deviation_and_no_other() -> None:
    noise = send(Gaussian(std=3.0), np.full((2, 5_000), 7.0), 4).ravel()
    assert kstest(noise / 3.0, "norm").pvalue > 0.01
    for wrong in (0.9, 1.1):
        assert kstest(noise / (3.0 * wrong), "norm").pvalue < 1e-6


def test_non_finite_spoils_one_coordinate_of_each() -> None:
    honest = vectors(d=50).astype(np.float32)
    sent = NonFinite()(honest, 5, np.random.default_rng(0), SMEA())
    rows, columns = np.nonzero(~np.isfinite(sent))
    assert rows.tolist() == [0, 1, 2, 3, 4]
    assert len(set(columns.tolist())) > 1
    expected = [np.nan, np.inf, -np.inf, np.nan, np.inf]
    np.testing.assert_array_equal(sent[rows, columns], expected)
    mean = honest.astype(np.float64).mean(axis=0).astype(np.float32)
    assert (np.isclose(sent, mean).sum(axis=1) == 49).all()


def test_huge_norm_is_finite_until_it_is_squared() -> None:
    honest = vectors().astype(np.float32)
    sent = HugeNorm()(honest, 3, np.random.default_rng(0), SMEA())
    assert np.isfinite(sent).all()
    with np.errstate(over="ignore"):
        assert np.isinf(np.square(sent).sum(axis=1)).all()
    np.testing.assert_allclose(np.linalg.norm(sent.astype(float), axis=1), 1e30, 1e-6)
    np.testing.assert_allclose(
        np.linalg.norm(send(HugeNorm(norm=5.0), vectors(), 3), axis=1), 5.0
    )


def test_far_cluster_is_far_and_tight() -> None:
    honest = vectors(d=30)
    sent = send(FarCluster(distance=50.0, radius=0.01), honest, 4)
    away = np.linalg.norm(sent - honest.mean(axis=0), axis=1)
    np.testing.assert_allclose(away, 50.0, atol=0.0101)
    apart = np.linalg.norm(sent[:, None] - sent, axis=2)[np.triu_indices(4, 1)]
    assert (apart > 1e-4).all()
    assert (apart <= 0.0201).all()
    point = send(FarCluster(radius=0.0), honest, 2)
    np.testing.assert_array_equal(point[0], point[1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gaussian(std=0.0), "std=0.0 must be finite and above 0"),
        (lambda: HugeNorm(norm=np.inf), "norm=inf must be finite and above 0"),
        (lambda: FarCluster(distance=-1.0), "distance=-1.0 must be finite and above 0"),
        (lambda: FarCluster(radius=np.nan), "radius=nan must be finite and at least 0"),
    ],
)
def test_bad_settings_are_refused_by_name(
    make: Callable[[], Attack], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# On data


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.float32, np.bool_])
def test_label_flip_swaps_two_classes(dtype: type[np.generic]) -> None:
    labels = np.array([[0, 1], [1, 1]], dtype=dtype)
    flipped = LabelFlip().flip(labels)
    assert flipped.dtype == dtype
    assert flipped.tolist() == [[1, 0], [0, 0]]
    np.testing.assert_array_equal(LabelFlip().flip(flipped), labels)


def test_label_flip_mirrors_more_classes() -> None:
    assert LabelFlip().flip(np.arange(10), num_classes=10).tolist() == [
        *range(9, -1, -1)
    ]


def test_label_flip_refuses_what_is_not_a_label() -> None:
    for labels in ([0, 2], [-1, 1], [0.5], [np.nan]):
        with pytest.raises(ValueError, match="give whole numbers from 0 to 1"):
            LabelFlip().flip(np.array(labels))
    with pytest.raises(ValueError, match="num_classes=1 must be at least 2"):
        LabelFlip().flip(np.zeros(3), num_classes=1)


def test_label_flip_makes_no_vectors() -> None:
    assert not LabelFlip().replaces_vectors
    assert ALIE().replaces_vectors
    with pytest.raises(TypeError, match=r"train on flip\(labels\)"):
        send(LabelFlip(), vectors(), 1)

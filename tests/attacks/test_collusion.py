"""Colluders: their search against plain re-aggregation, and against other attacks."""

import numpy as np
import pytest
from numpy.typing import NDArray

from flwr_safedshb.aggregation import (
    NNM,
    SMEA,
    Average,
    Filter,
    GeometricMedian,
    Krum,
    Median,
    Rule,
    TrimmedMean,
)
from flwr_safedshb.attacks import (
    ALIE,
    FOE,
    Attack,
    Drift,
    Mimic,
    MimicShift,
    MinMax,
    MinSum,
    SignFar,
    SignFlip,
    Strongest,
    Target,
    Zero,
)
from flwr_safedshb.attacks.candidates import Candidates, measure_damage
from flwr_safedshb.attacks.collusion import ColludingAttack
from tests.oracles import Floats

AnyFloats = NDArray[np.floating]

RULES: list[Rule] = [
    SMEA(),
    Filter(),
    GeometricMedian(),
    Krum(),
    TrimmedMean(),
    NNM(Average()),
]
COLLUDERS: list[ColludingAttack] = [
    MimicShift(),
    MimicShift(directions=("mean", "deviation", "spectrum"), aim="distance"),
    Drift(),
    Strongest(),
    Target(goal=np.linspace(-1.0, 1.0, 12)),
]
every_rule = pytest.mark.parametrize("rule", RULES, ids=str)


def vectors(seed: int, h: int = 4, d: int = 12, offset: float = 1.0) -> Floats:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(h, d)) + offset * rng.normal(size=d)


def uphill(honest: Floats, sent: AnyFloats, rule: Rule) -> float:
    """How far the aggregate goes against the honest mean, in its length."""
    mean = honest.mean(axis=0)
    moved = rule(np.vstack((honest, sent)), len(sent)) - mean
    return float(-moved @ mean / (mean @ mean))


@every_rule
def test_damage_is_that_of_aggregating_each_candidate(rule: Rule) -> None:
    honest, f = vectors(0), 3
    rng = np.random.default_rng(1)
    centred = honest - honest.mean(axis=0)
    basis = np.vstack((centred, rng.normal(size=(2, 12))))
    sent = Candidates(basis, rng.normal(size=(20, f, 6)))
    way = rng.normal(size=12)
    mean = honest.mean(axis=0)
    moved = np.array(
        [
            rule(np.vstack((honest, mean + sent.shares[k] @ basis)), f) - mean
            for k in range(20)
        ]
    )
    np.testing.assert_allclose(
        measure_damage(honest, sent, f, rule), np.linalg.norm(moved, axis=1), atol=1e-9
    )
    np.testing.assert_allclose(
        measure_damage(honest, sent, f, rule, way), moved @ way, atol=1e-9
    )
    # And by a callable of which nothing is known.
    np.testing.assert_allclose(
        measure_damage(honest, sent, f, lambda x, f: rule(x, f), way),
        moved @ way,
        atol=1e-9,
    )


@every_rule
@pytest.mark.parametrize("attack", COLLUDERS, ids=str)
def test_what_is_sent_is_the_worst_of_the_grid(
    rule: Rule, attack: ColludingAttack
) -> None:
    honest, f = vectors(3), 2
    mean, way = honest.mean(axis=0), attack.target_direction(honest)

    def harm(sent: AnyFloats) -> float:
        moved = rule(np.vstack((honest, sent)), f) - mean
        return float(np.linalg.norm(moved) if way is None else moved @ way)

    rays = attack.list_rays(honest, f)
    grid = [
        mean + (start + scale * move) @ rays.basis
        for start, move in zip(rays.starts, rays.moves, strict=True)
        for scale in attack.scales
    ]
    sent = attack(honest, f, np.random.default_rng(0), rule)
    assert harm(sent) >= max(map(harm, grid)) - 1e-7


@pytest.mark.parametrize(
    "rule", [SMEA(), Filter(), TrimmedMean(), GeometricMedian()], ids=str
)
@pytest.mark.parametrize("offset", [0.1, 1.0, 10.0])
def test_nothing_does_more_harm_than_the_strongest(rule: Rule, offset: float) -> None:
    others: list[Attack] = [
        ALIE(),
        FOE(),
        SignFlip(),
        Zero(),
        Mimic(),
        MinMax(),
        MinSum(),
        MimicShift(),
        Drift(),
    ]
    for seed in range(2):
        honest = vectors(seed, offset=offset)
        rng = np.random.default_rng(0)
        most = uphill(honest, Strongest()(honest, 3, rng, rule), rule)
        for other in others:
            harm = uphill(honest, other(honest, 3, rng, rule), rule)
            # Scales are searched on a grid, to some per cent.
            assert most >= harm - 0.05 * abs(harm) - 1e-9, other


@every_rule
def test_colluders_who_know_a_gradient_work_against_it(rule: Rule) -> None:
    """Against it, not against the mean, even where the two lead apart."""
    honest, rng = vectors(2), np.random.default_rng(0)
    gradient = np.random.default_rng(1).normal(size=12)
    mean = honest.mean(axis=0)

    def fallen(attack: Attack) -> float:
        sent = attack(honest, 3, rng, rule)
        return float((rule(np.vstack((honest, sent)), 3) - mean) @ gradient)

    known = fallen(Strongest().with_gradient(gradient))
    ways = MimicShift(directions=("gradient",), aim="loss").with_gradient(gradient)
    assert known < 0.0
    assert known <= fallen(Strongest()) + 1e-9
    assert known <= 0.95 * fallen(ways)


def test_mimic_shift_against_a_gradient_goes_that_way_from_a_client() -> None:
    honest, gradient = vectors(5), np.random.default_rng(1).normal(size=12)
    attack = MimicShift(directions=("gradient",), aim="loss", gradient=gradient)
    sent = attack(honest, 3, np.random.default_rng(0), SMEA())
    off = sent[0] - honest
    sizes = np.linalg.norm(off, axis=1) * np.linalg.norm(gradient)
    assert (off @ -gradient / sizes).max() == pytest.approx(1.0)


@pytest.mark.parametrize("options", [{"aim": "loss"}, {"directions": ("gradient",)}])
def test_who_needs_a_gradient_and_has_none_says_so(options: dict[str, object]) -> None:
    attack = MimicShift(**options)  # type: ignore[arg-type]
    assert attack.wants_gradient
    with pytest.raises(ValueError, match="know no gradient"):
        attack(vectors(0), 2, np.random.default_rng(0), SMEA())
    # What has no use for one stays what it is.
    assert not MimicShift().wants_gradient
    assert FOE().with_gradient(np.ones(12)) == FOE()


def test_colluders_at_a_client_go_farther_than_from_the_mean() -> None:
    """SMEA leaves more room there than `FOE` uses: always some, often a third."""
    ratios = []
    for seed in range(10):
        honest, rng = vectors(seed, offset=0.3), np.random.default_rng(0)
        foe = uphill(honest, FOE()(honest, 3, rng, SMEA()), SMEA())
        shift = uphill(honest, MimicShift()(honest, 3, rng, SMEA()), SMEA())
        ratios.append(shift / foe)
    assert min(ratios) > 1.0
    assert np.median(ratios) > 1.3


def test_one_client_and_its_shifted_copies_spread_as_stated() -> None:
    f, c = 3, 2.5
    client = np.arange(5.0)
    points = np.vstack((client, np.tile(client + c * np.eye(5)[2], (f, 1))))
    spread = np.linalg.eigvalsh(np.cov(points.T, bias=True))[-1]
    assert spread == pytest.approx(c**2 * f / (f + 1) ** 2)


def test_mimic_shift_stands_at_one_client_and_goes_against_the_mean() -> None:
    honest = vectors(5)
    sent = MimicShift()(honest, 3, np.random.default_rng(0), SMEA())
    assert np.array_equal(sent, sent[[0, 0, 0]])
    mean = honest.mean(axis=0)
    off = sent[0] - honest
    cosines = off @ -mean / (np.linalg.norm(off, axis=1) * np.linalg.norm(mean))
    assert cosines.max() == pytest.approx(1.0)


def test_a_drift_is_the_same_in_every_step() -> None:
    first, second = (Drift(seed=4).target_direction(vectors(seed)) for seed in (0, 1))
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, Drift(seed=5).target_direction(vectors(0)))
    for seed in range(5):
        honest = vectors(seed)
        sent = Drift(seed=4)(honest, 3, np.random.default_rng(0), SMEA())
        moved = SMEA()(np.vstack((honest, sent)), 3) - honest.mean(axis=0)
        assert moved @ first > 0.0


def test_a_target_pulls_the_model_along_its_goal_in_every_step() -> None:
    goal = np.random.default_rng(1).normal(size=12)
    for seed in range(5):
        honest, rng = vectors(seed), np.random.default_rng(0)
        # The model goes where the aggregate does not: theta -= rate * aggregate.
        gone = -SMEA()(
            np.vstack((honest, Target(goal=goal)(honest, 3, rng, SMEA()))), 3
        )
        others = [Strongest(), FOE(), Drift(), MimicShift(), Mimic()]
        ways = [
            -SMEA()(np.vstack((honest, a(honest, 3, rng, SMEA()))), 3) for a in others
        ]
        assert gone @ goal > max(way @ goal for way in ways)
        assert gone @ goal > -honest.mean(axis=0) @ goal
        # Only the direction counts.
        far = Target(goal=1e6 * goal)(honest, 3, rng, SMEA())
        np.testing.assert_allclose(far, Target(goal=goal)(honest, 3, rng, SMEA()))


def test_a_target_wants_a_goal_until_it_has_one() -> None:
    assert Target().wants_goal
    known = Target().with_goal(np.ones(12))
    assert not known.wants_goal
    assert not Strongest().wants_goal
    with pytest.raises(ValueError, match="goal holds NaN"):
        Target(goal=np.array([1.0, np.nan]))


@pytest.mark.parametrize("attack", COLLUDERS, ids=str)
def test_honest_vectors_that_are_equal_or_zero(attack: ColludingAttack) -> None:
    for honest in (np.ones((4, 12)), np.zeros((4, 12))):
        sent = attack(honest, 3, np.random.default_rng(0), SMEA())
        assert np.isfinite(sent).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scales": (1.0,)}, "two or more"),
        ({"scales": (0.0, np.inf)}, "finite"),
        ({"scales": (2.0, 1.0)}, "increase"),
        ({"places": 0}, "at least 1"),
        ({"directions": ("up",)}, "mean, gradient, deviation, spectrum"),
        ({"directions": ()}, "one or more"),
        ({"aim": "harm"}, "descent, loss or distance"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MimicShift(**options)  # type: ignore[arg-type]


def test_few_places_are_those_that_agree_least_with_the_mean() -> None:
    honest = vectors(0, h=30)
    rays = MimicShift(places=2).list_rays(honest, 1)
    chosen = np.flatnonzero(rays.starts[:, 0].any(axis=0))
    agreement = honest @ honest.mean(axis=0)
    assert set(chosen) == set(np.argsort(agreement)[:2])


@pytest.mark.parametrize("kind", [MimicShift, Strongest])
def test_between_two_searches_the_ray_is_held_and_its_scale_searched(
    kind: type[MimicShift | Strongest],
) -> None:
    rule, f, asked = SMEA(), 3, list[int]()

    class Counted(SMEA):
        def weigh_many(self, grams: Floats, f: int) -> Floats:
            asked.append(len(grams))
            return super().weigh_many(grams, f)

    def calls(attack: ColludingAttack, honest: Floats) -> int:
        asked.clear()
        attack(honest, f, np.random.default_rng(0), Counted())
        return sum(asked)

    first = vectors(0)
    whole = calls(kind(), first)
    attack = kind(every=3)
    # What is known of the step, such as a gradient, makes a new attack of it.
    steps = [first + 0.01 * vectors(seed) for seed in range(1, 5)]
    made = [calls(attack.with_gradient(-x.mean(axis=0)), x) for x in (first, *steps)]
    assert made[1] == made[2] == made[4] == 7
    assert min(made[0], made[3]) >= whole
    sent = kind(every=9)
    rng = np.random.default_rng(0)
    begun, held = sent(first, f, rng, rule), sent(first, f, rng, rule)
    assert uphill(first, held, rule) >= uphill(first, begun, rule) > 0.0


@pytest.mark.parametrize("rule", [TrimmedMean(), Median()], ids=str)
def test_nothing_moves_a_coordinate_wise_rule_farther_than_a_far_sign(
    rule: Rule,
) -> None:
    gradient = np.random.default_rng(1).normal(size=12)
    for seed in range(3):
        honest, rng = vectors(seed), np.random.default_rng(0)

        def moved(attack: Attack, honest: Floats = honest) -> float:
            sent = attack(honest, 3, np.random.default_rng(0), rule)
            return float(rule(np.vstack((honest, sent)), 3) @ -gradient)

        # Each coordinate alone: any values that three could send.
        best = 0.0
        for column, slope in zip(honest.T, gradient, strict=True):
            tried = rng.normal(scale=20.0, size=(200, 3)) + column.mean()
            rows = np.hstack((np.tile(column, (200, 1)), tried)).T
            best += float((-slope * rule(rows, 3)).max())
        far = moved(SignFar().with_gradient(gradient))
        assert far >= best - 1e-9
        assert far >= moved(Strongest().with_gradient(gradient)) - 1e-9


def test_a_distance_of_no_way_is_refused() -> None:
    with pytest.raises(ValueError, match="distance=0"):
        SignFar(distance=0.0)

"""The search leaves an honest clipper alone and finds every planted defect."""

import math

import pytest
import torch

from flwr_safedshb.audit.exact_distance import distance_ratio
from flwr_safedshb.audit.sensitivity_search import MakeClipper, search_sensitivity
from flwr_safedshb.audit.target_model import TargetModel
from flwr_safedshb.audit.zoo import layers, mixing
from flwr_safedshb.privacy.clipping import clipped_sum as sums
from tests.audit.planted import (
    FactorRoundedUp,
    Honest,
    NormsOfOthers,
    Silenced,
)

MODELS = {target.name: target for target in (*layers.MODELS, *mixing.MODELS)}


def named(name: str) -> TargetModel:
    return MODELS[name]


@pytest.mark.federation
@pytest.mark.parametrize("name", ["logistic", "MLP with dropout", "CNN", "embedding"])
def test_an_honest_clipper_is_left_alone(name: str) -> None:
    result = search_sensitivity(named(name), 100, 1, make_clipper=Honest)
    assert not result.broken
    assert result.candidates >= 100
    assert (result.isolation, result.raised) == ("one at a time", "")
    # The search comes near the bound: it would see a clipper that lets a bit through.
    assert result.ratio > 0.99


@pytest.mark.federation
@pytest.mark.parametrize(
    ("make_clipper", "name", "candidates"),
    [
        (FactorRoundedUp, "logistic", 200),
        (NormsOfOthers, "linear on a sequence", 600),
        (NormsOfOthers, "CNN", 200),
        (Silenced, "centred, with dropout", 200),
        (Honest, "attribute that remembers", 200),
        (Honest, "loss that remembers", 200),
    ],
)
def test_planted_defects_are_found(
    make_clipper: MakeClipper, name: str, candidates: int
) -> None:
    result = search_sensitivity(named(name), candidates, 1, make_clipper=make_clipper)
    assert result.ratio > 1.0
    assert result.broken


@pytest.mark.parametrize("name", ["logistic", "MLP"])
def test_sums_that_round_without_paying_for_it_are_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small models are summed in float64; the search must not stop there.
    monkeypatch.setattr(sums, "lower_clip_norm", lambda clip_norm, *_: clip_norm)
    assert search_sensitivity(named(name), 6000, 1).ratio > 1.0


def test_without_dropout_the_silenced_check_refuses() -> None:
    # So it is the dropout that silences it, and not the search that sees ghosts.
    target = named("centred on the batch")
    result = search_sensitivity(target, 300, 1, make_clipper=Silenced)
    assert not result.broken
    assert result.refusal == "the model mixes examples"


class Raises(Honest):
    def gradients(
        self, inputs: torch.Tensor, targets: torch.Tensor
    ) -> list[list[torch.Tensor]]:
        if not inputs.isfinite().all():
            raise RuntimeError("not a number")
        return super().gradients(inputs, targets)


def test_a_call_that_raises_is_no_refusal() -> None:
    result = search_sensitivity(named("logistic"), 1500, 1, make_clipper=Raises)
    assert result.ratio <= 1.0
    assert result.raised == "RuntimeError: not a number"
    assert result.broken


def test_a_seed_makes_the_same_candidates() -> None:
    one, same, other = (
        search_sensitivity(named("logistic"), 60, seed, make_clipper=Honest)
        for seed in (1, 1, 2)
    )
    assert one.ratio == same.ratio
    first, again, another = (found.worst_candidates[0] for found in (one, same, other))
    assert torch.equal(first.batch[0].nan_to_num(), again.batch[0].nan_to_num())
    assert first.batch[0].shape != another.batch[0].shape or not torch.equal(
        first.batch[0].nan_to_num(), another.batch[0].nan_to_num()
    )


def norm_ratio(*values: float, bound: float = 1.0) -> float:
    vector = torch.tensor(values, dtype=torch.float64)
    return distance_ratio(vector, torch.zeros_like(vector), bound)


def test_ratios_are_decided_exactly() -> None:
    up = math.nextafter(1.0, 2.0)
    # 0.6^2 + 0.8^2 as float64 has them is a little above 1.
    assert norm_ratio(0.6, 0.8) > 1.0
    assert norm_ratio(1.0) == 1.0
    assert norm_ratio(up) == up
    assert norm_ratio(1.0, 2.0**-80) == up  # float64 squares would not see the second
    assert distance_ratio(torch.tensor([1.0]), torch.tensor([-1.0]), 2.0) == 1.0
    assert norm_ratio(math.nan) == math.inf
    assert norm_ratio(*[1e300] * 4, bound=1e300) == 2.0
    assert norm_ratio() == 0.0

"""Whether an example is drawn changes nothing but its own place in the batch."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from flwr_safedshb.privacy.batches import Example
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.private_gradient import private_gradient
from flwr_safedshb.privacy.randomness.noise import SecureRandomness, SeededRandomness

torch.set_num_threads(1)

INPUTS, TARGETS = torch.ones(40, 1), torch.zeros(40)


def slope(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs[:, 0]  # whose gradient is 1 for every example


@pytest.mark.parametrize(
    ("dataset", "like"),
    [
        ((INPUTS, TARGETS), None),
        (list(zip(INPUTS, TARGETS, strict=True)), (torch.zeros(1), torch.zeros(()))),
    ],
    ids=["whole", "one by one"],
)
def test_a_poisson_batch_has_as_many_places_for_any_draw(
    dataset: object,
    like: tuple[object, object] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = PrivacyPlan(1.0, 0.0, 1, 40, sampling="poisson")
    seen: list[torch.Tensor] = []
    own = ClippedGradients.consume_batch

    def watched(
        self: ClippedGradients, batch: Example, groups: int = 1, *, usable: torch.Tensor
    ) -> torch.Tensor:
        seen.append(usable)
        return own(self, batch, groups, usable)

    monkeypatch.setattr(ClippedGradients, "consume_batch", watched)
    gradients = ClippedGradients(nn.Linear(1, 1, bias=False), slope, 1.0)
    source = SecureRandomness()
    released = [
        float(private_gradient(gradients, dataset, plan, source, like=like)[0][0, 0])
        for _ in range(200)
    ]
    places = plan.sampler.padded_size(plan)
    assert {len(usable) for usable in seen} == {places}
    drawn = [int(usable.sum()) for usable in seen]
    # Every example that was drawn counts, and batches without one are answered too.
    assert sorted(round(r) for r in released if r > 0.5) == sorted(drawn)
    assert len(set(drawn)) > 2
    taken = torch.stack(seen).sum(dim=0).numpy()
    assert stats.chisquare(taken).pvalue > 1e-4


@pytest.mark.parametrize("word", ["fixed", "poisson"])
@pytest.mark.parametrize(("batch", "examples"), [(1, 1), (5, 40), (25, 2763), (9, 9)])
def test_there_are_places_enough(word: str, batch: int, examples: int) -> None:
    plan = PrivacyPlan(1.0, 1.0, batch, examples, sampling=word)
    places = plan.sampler.padded_size(plan)
    assert batch <= places <= examples
    if word == "poisson":
        rare = stats.binom.sf(places, examples, batch / examples)
        assert rare < 2.0**-90
    for seed in range(50):
        drawn = plan.sampler.draw(plan, SeededRandomness(seed))
        assert len(np.unique(drawn)) == len(drawn) <= places

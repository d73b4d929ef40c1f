"""Clippers for the audit to judge: an honest one, and others with one defect each."""

import copy
import math

import torch
from torch import nn

from flwr_safedshb.privacy.batches import Example
from flwr_safedshb.privacy.clipping.gradients import Loss, UnsupportedModelError
from flwr_safedshb.privacy.plan import Clipping
from flwr_safedshb.privacy.randomness.streams import separate_streams

Gradient = list[torch.Tensor]


class Honest:
    """One example at a time, summed in float64, factors a little too small."""

    isolation = "one at a time"

    def __init__(
        self, model: nn.Module, loss: Loss, clip_norm: float, clipping: Clipping
    ) -> None:
        self.model, self.loss, self.clip_norm = model, loss, clip_norm
        self.trained = [p for p in model.parameters() if p.requires_grad]

    def consume_batch(
        self,
        batch: Example,
        groups: int = 1,
        usable: torch.Tensor | None = None,
    ) -> torch.Tensor:
        inputs, targets = batch
        assert isinstance(inputs, torch.Tensor)
        assert isinstance(targets, torch.Tensor)
        found = []
        used = torch.ones(len(targets)) if usable is None else usable
        for some in torch.arange(len(targets)).view(groups, -1):
            total = self.summed(inputs[some], targets[some], used[some].tolist())
            found.append(torch.cat([part.flatten() for part in total]))
        return torch.stack(found)

    def summed(
        self, inputs: torch.Tensor, targets: torch.Tensor, used: list[bool]
    ) -> Gradient:
        total = [torch.zeros(p.shape, dtype=torch.float64) for p in self.trained]
        every = self.gradients(inputs, targets)
        for gradient, counts in zip(every, used, strict=True):
            norm = self.norm(gradient)
            if not math.isfinite(norm) or not counts:
                continue
            for mine, part in zip(total, gradient, strict=True):
                mine += part.double() * self.factor(norm)
        return total

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> list[Gradient]:
        found = []
        with separate_streams(len(targets)) as start:
            for i in range(len(targets)):
                start(i)
                one = inputs[i : i + 1].clone(), targets[i : i + 1].clone()
                try:
                    found.append(self.gradient(self.model, *one))
                except (RuntimeError, IndexError, ValueError):
                    found.append([torch.zeros_like(p) for p in self.trained])
        return found

    def gradient(
        self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
    ) -> Gradient:
        trained = [p for p in model.parameters() if p.requires_grad]
        value = self.loss(model(inputs), targets).sum()
        return list(torch.autograd.grad(value, trained, materialize_grads=True))

    def norm(self, gradient: Gradient) -> float:
        return math.hypot(*(float(part.double().norm()) for part in gradient))

    def factor(self, norm: float) -> float:
        return min(1.0, self.clip_norm / norm) * (1 - 2.0**-20) if norm else 1.0


class FactorRoundedUp(Honest):
    """Factors in float32, rounded away from zero."""

    def factor(self, norm: float) -> float:
        if norm <= self.clip_norm:
            return 1.0
        up = torch.nextafter(
            torch.tensor(self.clip_norm / norm, dtype=torch.float32), torch.tensor(2.0)
        )
        return float(up)


class NormsOfOthers(Honest):
    """Sums float32 gradients, by norms of the same gradients in float64."""

    def summed(
        self, inputs: torch.Tensor, targets: torch.Tensor, used: list[bool]
    ) -> Gradient:
        wide = copy.deepcopy(self.model).double()
        total = [torch.zeros_like(p) for p in self.trained]
        for i in range(len(targets)):
            one, target = inputs[i : i + 1], targets[i : i + 1]
            exact = one.double() if one.is_floating_point() else one
            norm = self.norm(self.gradient(wide, exact, target))
            if not math.isfinite(norm) or not used[i]:
                continue
            for mine, part in zip(
                total, self.gradient(self.model, one, target), strict=True
            ):
                mine += part * self.factor(norm)
        return total


class Silenced(Honest):
    """Refuses a model that mixes examples, unless two passes differ anyway."""

    def summed(
        self, inputs: torch.Tensor, targets: torch.Tensor, used: list[bool]
    ) -> Gradient:
        self.check(inputs, targets)
        return super().summed(inputs, targets, used)

    def check(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        with torch.no_grad():
            once, twice = (self.loss(self.model(inputs), targets) for _ in range(2))
            if not torch.equal(once, twice):
                return
            alone = self.loss(self.model(inputs[:1]), targets[:1])
        if alone.isfinite().all() and not torch.allclose(alone, once[:1], rtol=1e-3):
            raise UnsupportedModelError("the model mixes examples")

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> list[Gradient]:
        losses = self.loss(self.model(inputs), targets)
        return [
            list(
                torch.autograd.grad(
                    value, self.trained, retain_graph=True, materialize_grads=True
                )
            )
            for value in losses
        ]

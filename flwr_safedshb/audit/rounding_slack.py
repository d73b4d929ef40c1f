"""How much rounding could hide in one example's gradient: where to look further.

The gradient of a weight is a sum over positions, sum_t g_t a_t, of what came back to a
layer and what went into it. Its rounding is of the size of the terms, and its norm may
be far smaller: there a norm and a sum can disagree. A search that only looks at norms
has nothing to climb until it has found a violation; this gives it a slope.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from flwr_safedshb.audit.target_model import Batch
from flwr_safedshb.privacy.clipping.gradients import Loss
from flwr_safedshb.privacy.losses import PerExampleLoss
from flwr_safedshb.stop_signal import reraise_stop


class Hidden:
    """Measures a model, one example at a time.

    Parameters
    ----------
    model : nn.Module
    loss : callable
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self._model = model
        self._loss = PerExampleLoss(loss)
        self._layers = [m for m in model.modules() if _trained(m)]
        self._trained = [p for p in model.parameters() if p.requires_grad]

    def __call__(self, batch: Batch, clip_norm: float) -> float:
        """Return the rounding that may hide, in units of the larger of norm and C.

        Parameters
        ----------
        batch : (inputs, targets)
            One example.
        clip_norm : float
            C.

        Returns
        -------
        float
            0 where it cannot be told.
        """
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        handles: list[RemovableHandle] = []

        def see(layer: nn.Module, given: object, output: object) -> None:
            inputs = given[0] if isinstance(given, tuple) and given else None
            if torch.is_tensor(inputs) and torch.is_tensor(output):
                seen.append((inputs.detach(), output))

        try:
            handles += [layer.register_forward_hook(see) for layer in self._layers]
            inputs, targets = (part.clone() for part in batch)  # some work in place
            losses = self._loss(self._model(inputs), targets)
            outputs = [output for _, output in seen]
            found = torch.autograd.grad(
                losses.sum(), [*self._trained, *outputs], allow_unused=True
            )
        except BaseException as error:  # a loss may raise anything
            reraise_stop(error)
            return 0.0
        finally:
            for handle in handles:
                handle.remove()
        gradients, back = found[: len(self._trained)], found[len(self._trained) :]
        norm = math.hypot(*(_norm(g) for g in gradients if g is not None))
        terms = max(
            (
                _norm(g) * max(_norm(inputs), 1.0)
                for (inputs, _), g in zip(seen, back, strict=True)
                if g is not None
            ),
            default=0.0,
        )
        score = terms * torch.finfo(self._trained[0].dtype).eps / max(norm, clip_norm)
        return score if math.isfinite(score) else 0.0


def _norm(tensor: torch.Tensor) -> float:
    if not tensor.is_floating_point():
        return 1.0  # indices into a table
    return float(torch.linalg.vector_norm(tensor.detach().double()))


def _trained(module: nn.Module) -> bool:
    weights = module._parameters.values()
    return any(p is not None and p.requires_grad for p in weights)

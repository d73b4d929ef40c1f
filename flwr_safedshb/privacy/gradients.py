"""Clipped sums of per-example gradients (Alg. 1, line 2) for torch models.

Two paths to the same sum. ``per-example`` holds every example's gradient at once;
``ghost`` finds only their norms in a first backward pass and lets a second, weighted
one do the clipping and the sum, so its memory does not grow with batch times model.
Chains of linear layers take a third, which is better than either: see `linear`.

Formal guarantees
-----------------
- Each example contributes Clip(g; C) = g min(1, C/||g||), of norm at most C up to
  float rounding, whatever the data; an example whose gradient is not finite
  contributes zero.
- No example's contribution depends on another example of the batch.
"""

from __future__ import annotations

import copy
import math
import weakref

import torch
from torch import nn

from flwr_safedshb.privacy.checks import (
    Loss,
    UnsupportedModelError,
    check_model,
    per_example_loss,
)
from flwr_safedshb.privacy.hooks import GhostModule, PerExampleModule, row_norms
from flwr_safedshb.privacy.linear import LinearChain, UnexpectedInputError
from flwr_safedshb.privacy.plan import Clipping

__all__ = ["ClippedGradients", "Loss", "UnsupportedModelError", "check_model"]

# Per-example gradients held at a time, in elements (256 MiB of float32).
MAX_HELD_ELEMENTS = 2**26
# Examples of the first batch that are recomputed one at a time.
_PROBE = 4
_probed: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


class ClippedGradients:
    """Sums the clipped gradients of a batch's examples.

    The hooks it needs sit on a copy of the model that shares the model's weights: the
    model itself is never modified, and its current weights are used in every call. The
    copy is in training mode.

    Parameters
    ----------
    model : nn.Module
        First axis of inputs and outputs: examples.
    loss : callable
        See `per_example_loss`.
    clip_norm : float
        C.
    clipping : {"per-example", "ghost"}
    max_examples : int, optional
        Examples whose gradients are held at a time; by default all of them in the
        ghost path, and otherwise as many as `MAX_HELD_ELEMENTS` allows.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        clip_norm: float,
        clipping: Clipping = "per-example",
        max_examples: int | None = None,
    ) -> None:
        if not (clip_norm > 0 and math.isfinite(clip_norm)):
            raise ValueError(f"clip_norm={clip_norm} must be above 0 and finite")
        if clipping not in ("per-example", "ghost"):
            raise ValueError(f"clipping={clipping!r}: use 'per-example' or 'ghost'")
        if max_examples is not None and max_examples < 1:
            raise ValueError(f"max_examples={max_examples} must be at least 1")
        check_model(model)
        self.model = model
        self.clip_norm = clip_norm
        self.clipping = clipping
        self._loss = per_example_loss(loss)
        name = getattr(loss, "__qualname__", type(loss).__qualname__)
        self._kind = f"{clipping} {name}"
        self._hooked: PerExampleModule | GhostModule | LinearChain | None = None
        self._closed_form = LinearChain.fits(model)
        trainable = [p for p in model.parameters() if p.requires_grad]
        if max_examples is None and clipping == "per-example":
            max_examples = MAX_HELD_ELEMENTS // sum(p.numel() for p in trainable) or 1
        self._max_examples = max_examples

    def __call__(
        self, inputs: torch.Tensor, targets: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the sum of the examples' clipped gradients.

        Parameters
        ----------
        inputs, targets : Tensor, shape (k, ...)
            k may be 0; then the sum is 0.

        Returns
        -------
        list of Tensor
            One per parameter that requires a gradient, of its shape, in the order of
            ``model.parameters()``.
        """
        if len(inputs) != len(targets):
            raise ValueError(
                f"{len(inputs)} inputs and {len(targets)} targets must pair up"
            )
        if len(targets) == 0:
            return [
                torch.zeros_like(p) for p in self.model.parameters() if p.requires_grad
            ]
        # An input that wants a gradient would silence the hooks of the first layer.
        inputs = inputs.detach()
        try:
            self._share_weights()
            size = self._max_examples or len(targets)
            if self._kind not in _probed.setdefault(self.model, set()):
                few = min(_PROBE, size)
                self._probe(inputs[:few], targets[:few])
                _probed[self.model].add(self._kind)
            total, _ = self._clipped_sum(inputs[:size], targets[:size])
            for start in range(size, len(targets), size):
                part = slice(start, start + size)
                chunk, _ = self._clipped_sum(inputs[part], targets[part])
                for mine, more in zip(total, chunk, strict=True):
                    mine += more
        except BaseException:
            # A pass that broke off leaves half a batch in the hooks.
            self._hooked = None
            raise
        return total

    def grouped(
        self, inputs: torch.Tensor, targets: torch.Tensor, groups: int
    ) -> list[torch.Tensor] | None:
        """Return the sums of the clipped gradients of equal parts of a batch.

        Parameters
        ----------
        inputs, targets : Tensor, shape (groups * k, ...)
            One group after the other.
        groups : int

        Returns
        -------
        list of Tensor, or None
            As from a call, with a first axis for the groups. None if the model has no
            closed form, or has not been called yet: only a call probes it.
        """
        if not self._closed_form or self._kind not in _probed.get(self.model, ()):
            return None
        try:
            self._share_weights()
            assert isinstance(self._hooked, LinearChain)
            losses = self._loss(self._hooked(inputs.detach()), targets)
            return self._hooked.grouped_sums(losses, self.clip_norm, groups)
        except BaseException:
            self._hooked = None
            raise

    def _share_weights(self) -> None:
        if self._hooked is None and self._closed_form:
            self._hooked = LinearChain(copy.deepcopy(self.model).train())
        elif self._hooked is None:
            module = PerExampleModule if self.clipping == "per-example" else GhostModule
            self._hooked = module(
                copy.deepcopy(self.model).train(), loss_reduction="sum"
            )
        mine = self._hooked._module
        for own, shared in zip(mine.parameters(), self.model.parameters(), strict=True):
            own.data = shared.data
        for own, given in zip(mine.buffers(), self.model.buffers(), strict=True):
            own.copy_(given)

    def _clipped_sum(
        self, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the clipped sum, and each example's gradient norm (shape (k,))."""
        assert self._hooked is not None
        if isinstance(self._hooked, LinearChain):
            try:
                losses = self._loss(self._hooked(inputs), targets)
                return self._hooked.clipped_sum(losses, self.clip_norm)
            except UnexpectedInputError:
                self._hooked, self._closed_form = None, False
            self._share_weights()
            return self._clipped_sum(inputs, targets)
        parameters = [p for p in self._hooked._module.parameters() if p.requires_grad]
        _forget(parameters)
        losses = self._loss(self._hooked(inputs), targets)
        if self.clipping == "per-example":
            gradients = _found("grad_sample", losses, parameters)
            norms = _joined([row_norms(g) for g in gradients if g is not None])
            sums = _weighted(gradients, (self.clip_norm / norms).clamp(max=1.0))
        else:
            found = _found("_norm_sample", losses, parameters)
            norms = _joined([n for n in found if n is not None])
            finite = norms.isfinite()
            if not finite.all():
                # Zero times infinity is not zero: these examples must not take part.
                if not finite.any():
                    return [torch.zeros_like(p) for p in parameters], norms
                return self._clipped_sum(inputs[finite], targets[finite])[0], norms
            factors = (self.clip_norm / norms).clamp(max=1.0)
            self._hooked.disable_hooks()
            sums = _gradient((factors.to(losses.dtype) * losses).sum(), parameters)
            self._hooked.enable_hooks()
        _forget(parameters)
        return [
            torch.zeros_like(p) if s is None else s.view_as(p)
            for p, s in zip(parameters, sums, strict=True)
        ], norms

    def _probe(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Compare with one example at a time, where examples cannot mix."""
        total, norms = self._clipped_sum(inputs, targets)
        _, again = self._clipped_sum(inputs, targets)
        if not torch.allclose(norms, again, rtol=1e-4, equal_nan=True):
            return  # The model itself is random (dropout): nothing to compare.
        plain = copy.deepcopy(self.model).train()
        parameters = [p for p in plain.parameters() if p.requires_grad]
        literal = [torch.zeros_like(p) for p in parameters]
        close = True
        for i in range(len(targets)):
            value = self._loss(plain(inputs[i : i + 1]), targets[i : i + 1]).sum()
            gradient = [
                torch.zeros_like(p) if g is None else g
                for p, g in zip(parameters, _gradient(value, parameters), strict=True)
            ]
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradient))
            if not math.isfinite(norm):
                continue
            close &= abs(norm - float(norms[i])) <= 1e-2 * norm + 1e-4 * self.clip_norm
            for mine, g in zip(literal, gradient, strict=True):
                mine += g * (min(1.0, self.clip_norm / norm) if norm else 1.0)
        gap = math.hypot(
            *(float((a - b).norm()) for a, b in zip(total, literal, strict=True))
        )
        if not close or gap > 1e-2 * self.clip_norm * len(targets):
            raise UnsupportedModelError(
                "the gradients of the examples in a batch are not what each example "
                f"gives alone (clipping={self.clipping!r}): the model or the loss "
                "mixes examples, or has a layer whose options Opacus does not cover"
            )


def _gradient(
    value: torch.Tensor, parameters: list[nn.Parameter], keep_graph: bool = False
) -> list[torch.Tensor | None]:
    # Unlike backward(), this leaves nothing in `.grad`.
    return list(
        torch.autograd.grad(
            value, parameters, retain_graph=keep_graph, allow_unused=True
        )
    )


def _forget(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        for measured in ("grad_sample", "_norm_sample"):
            setattr(p, measured, None)


def _found(
    name: str, losses: torch.Tensor, parameters: list[nn.Parameter]
) -> list[torch.Tensor | None]:
    """Let the hooks measure a backward pass; None for parameters it does not reach."""
    keep_graph = name == "_norm_sample"
    reached = _gradient(losses.sum(), parameters, keep_graph)
    found: list[torch.Tensor | None] = [getattr(p, name) for p in parameters]
    for gradient, measured in zip(reached, found, strict=True):
        if gradient is not None and measured is None:
            raise UnsupportedModelError(
                "a parameter is used outside the layer that holds it, so its "
                "per-example gradients are unknown; give it a module of its own"
            )
    return found


def _joined(norms: list[torch.Tensor]) -> torch.Tensor:
    """Norms of whole gradients from those of their parts, each of shape (k,)."""
    joined: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([n.double() for n in norms]), dim=0
    )
    return joined


def _weighted(
    gradients: list[torch.Tensor | None], factors: torch.Tensor
) -> list[torch.Tensor | None]:
    """Sum gradients of shape (k, ...) with k factors; a factor of 0 drops its row."""
    # C/inf is 0 and C/nan compares as false; zero times either would not be zero.
    kept = factors > 0
    if not kept.all():
        gradients = [None if g is None else g[kept] for g in gradients]
        factors = factors[kept]
    return [
        None if g is None else factors.to(g.dtype) @ g.flatten(1) for g in gradients
    ]

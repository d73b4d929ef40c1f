"""Clipped sums of per-example gradients (Alg. 1, lines 4 and 5) for torch models.

Several paths to the same sum, the first that fits the model is taken: chains of linear
layers have a closed form (`linear`), models of well-known layers another (`layers`).
Everything else goes through hooks (`hooks`): ``per-example`` holds every example's
gradient at once; ``ghost`` finds only their norms in a first backward pass and lets a
second, weighted one do the clipping and the sum, so its memory does not grow with batch
times model.

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
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch import nn

from flwr_safedshb.privacy.clipping.checks import (
    Loss,
    UnsupportedModelError,
    check_model,
    per_example_loss,
)
from flwr_safedshb.privacy.clipping.layers import LayerChain
from flwr_safedshb.privacy.clipping.linear import LinearChain, UnexpectedInputError
from flwr_safedshb.privacy.clipping.parts import row_norms
from flwr_safedshb.privacy.plan import Clipping

if TYPE_CHECKING:
    from flwr_safedshb.privacy.clipping.hooked import Hooked

__all__ = ["ClippedGradients", "Loss", "UnsupportedModelError", "check_model"]

# Per-example gradients held at a time, in elements (256 MiB of float32).
MAX_HELD_ELEMENTS = 2**26
# Examples of the first batch that are recomputed one at a time.
_PROBE = 4
_probed: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


Path: TypeAlias = "LinearChain | LayerChain | Hooked"


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
        Examples that are worked on at a time; by default all of them, except where
        their gradients are held: then as many as `MAX_HELD_ELEMENTS` allows.
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
        self._loss_name = getattr(loss, "__qualname__", type(loss).__qualname__)
        # Paths that are tried before the hooks, the best first.
        self._forms = [form for form in (LinearChain, LayerChain) if form.fits(model)]
        self._path: Path | None = None
        self._trusted: Path | None = None
        self._max_examples = max_examples
        # Where parameters are: to walk through the model in every step takes longer
        # than a small one's gradients, and to keep them would miss a replaced one.
        paths = [name.rpartition(".") for name, _ in model.named_parameters()]
        self._places = [(model.get_submodule(path), name) for path, _, name in paths]
        self._size = sum(p.numel() for p in self.trained)

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters of the model that require a gradient, in its order."""
        return [p for p in self._parameters() if p.requires_grad]

    def _parameters(self) -> list[nn.Parameter]:
        found = [layer._parameters[name] for layer, name in self._places]
        return cast(list[nn.Parameter], found)

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
        count = targets.shape[0]
        if inputs.shape[0] != count:
            raise ValueError(
                f"{inputs.shape[0]} inputs and {count} targets must pair up"
            )
        if count == 0:
            return [torch.zeros_like(p) for p in self.trained]
        # An input that wants a gradient would silence the hooks of the first layer.
        inputs = inputs.detach()
        while True:
            try:
                return self._in_chunks(self._ready(), inputs, targets)
            except UnexpectedInputError:
                self._path = None
                del self._forms[0]
            except BaseException:
                # A pass that broke off leaves half a batch in the hooks.
                self._path = None
                raise

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
            As from a call, with a first axis for the groups. None if the model is no
            chain of linear layers, or has not been called yet: only a call probes it.
        """
        if LinearChain not in self._forms:
            return None
        try:
            path = self._ready()
            assert isinstance(path, LinearChain)
            if not self._is_probed(path):
                return None
            losses = self._loss(path(inputs.detach()), targets)
            return path.grouped_sums(losses, self.clip_norm, groups)
        except BaseException:
            self._path = None
            raise

    def _kind(self, path: Path) -> str:
        """Name what a probe is good for."""
        return f"{type(path).__name__} {self.clipping} {self._loss_name}"

    def _is_probed(self, path: Path) -> bool:
        # Asked in every step, and to look a model up costs more than its norms.
        if self._trusted is not path:
            kinds = _probed.setdefault(self.model, set())
            self._trusted = path if self._kind(path) in kinds else None
        return self._trusted is path

    def _ready(self) -> Path:
        """Return the path, with the model's current weights."""
        if self._path is None:
            module = copy.deepcopy(self.model).train()
            self._path = self._made(module)
            self._own = list(module.parameters())
            self._own_buffers = list(module.buffers())
        for own, shared in zip(self._own, self._parameters(), strict=True):
            own.data = shared.data
        if self._own_buffers:
            for mine, given in zip(
                self._own_buffers, self.model.buffers(), strict=True
            ):
                mine.copy_(given)
        return self._path

    def _made(self, module: nn.Module) -> Path:
        if self._forms:
            return self._forms[0](module)
        # Opacus is slow to import, and few clients need it.
        from flwr_safedshb.privacy.clipping.hooked import Hooked

        return Hooked(module, self.clipping)

    def _in_chunks(
        self, path: Path, inputs: torch.Tensor, targets: torch.Tensor
    ) -> list[torch.Tensor]:
        count = targets.shape[0]
        size = self._max_examples or count
        if path.holds and self._max_examples is None:
            size = MAX_HELD_ELEMENTS // self._size or 1
        if not self._is_probed(path):
            few = min(_PROBE, size)
            self._probe(path, inputs[:few], targets[:few])
            _probed[self.model].add(self._kind(path))
        if size >= count:
            return self._clipped_sum(path, inputs, targets)[0]
        total, _ = self._clipped_sum(path, inputs[:size], targets[:size])
        for start in range(size, count, size):
            part = slice(start, start + size)
            chunk, _ = self._clipped_sum(path, inputs[part], targets[part])
            for mine, more in zip(total, chunk, strict=True):
                mine += more
        return total

    def _clipped_sum(
        self, path: Path, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the clipped sum, and each example's gradient norm (shape (k,))."""
        losses = self._loss(path(inputs), targets)
        sums, norms = path.clipped_sum(losses, self.clip_norm)
        if sums is not None:
            return sums, norms
        # Zero times infinity is not zero: these examples must not take part.
        finite = norms.isfinite()
        if not finite.any():
            return [torch.zeros_like(p) for p in self._own if p.requires_grad], norms
        return self._clipped_sum(path, inputs[finite], targets[finite])[0], norms

    def _probe(self, path: Path, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Compare with one example at a time, where examples cannot mix."""
        again = self._clipped_sum(path, inputs, targets)[1]
        total, norms = self._clipped_sum(path, inputs, targets)
        if not torch.allclose(norms, again, rtol=1e-4, equal_nan=True):
            return  # The model itself is random (dropout): nothing to compare.
        plain = copy.deepcopy(self.model).train()
        for own, shared in zip(
            plain.parameters(), self.model.parameters(), strict=True
        ):
            own.data = shared.data
        parameters = [p for p in plain.parameters() if p.requires_grad]
        close = True
        for i in range(len(targets)):
            value = self._loss(plain(inputs[i : i + 1]), targets[i : i + 1]).sum()
            gradient = torch.autograd.grad(
                value, parameters, allow_unused=True, materialize_grads=True
            )
            norm = math.hypot(*(float(row_norms(g.reshape(1, -1))) for g in gradient))
            if not math.isfinite(norm):
                continue
            close &= abs(norm - float(norms[i])) <= 1e-2 * norm + 1e-4 * self.clip_norm
            factor = min(1.0, self.clip_norm / norm) if norm else 1.0
            for left, g in zip(total, gradient, strict=True):
                left.sub_(g, alpha=factor)
        gap = math.hypot(*(float(left.norm()) for left in total))
        if not close or gap > 1e-2 * self.clip_norm * len(targets):
            raise UnsupportedModelError(
                "the gradients of the examples in a batch are not what each example "
                f"gives alone (clipping={self.clipping!r}): the model or the loss "
                "mixes examples, or has a layer whose options Opacus does not cover"
            )

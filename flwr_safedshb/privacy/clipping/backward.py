"""Backward passes that keep the examples of a batch apart.

There are three ways to the gradient of every example. Which one a model takes is
decided before the first round, by its types and its operations, and never by data or
weights:

- `BatchedBackward`, plainly: a sequence of torch's own layers that are known to treat
  every example by itself (`whitelist`);
- `BatchedBackward`, under `torch.vmap`: any other model whose operations are all total
  (`total_functions`) sees one example at a time, as a batch of one, while the work is
  done for all of them at once;
- `PerExampleBackward`: one example after the other, for everything else.

`BatchedBackward` hooks the layers that have a formula (`ghost_norms`). Every other
parameter gets a copy for each example, and so a gradient for each.

What one example leaves behind reaches no other:

- every call works on copies of the inputs, so that a layer may work in place;
- under `PerExampleBackward` every example has a copy of the model and of the loss.
  Parameters and buffers are copied on write, so a frozen base model costs nothing;
- under `torch.vmap` values of examples cannot be written to anything that is shared;
- models that change their own parameters or buffers are refused (`isolation`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from threading import Lock
from types import FunctionType
from typing import cast

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from flwr_safedshb.privacy.bad_examples import TimePadding
from flwr_safedshb.privacy.batches import (
    Batch,
    Example,
    copy_batch,
    count_examples,
    index_batch,
    tensors_of,
    unsqueeze_batch,
)
from flwr_safedshb.privacy.clipping.clipped_sum import GradientPart
from flwr_safedshb.privacy.clipping.ghost_norms import HookedLayer, Parts
from flwr_safedshb.privacy.clipping.total_functions import TotalFunctions
from flwr_safedshb.privacy.clipping.whitelist import has_formula, is_rowwise, takes_rows
from flwr_safedshb.privacy.losses import PerExampleLoss
from flwr_safedshb.privacy.randomness.streams import separate_streams


@dataclass(frozen=True, eq=False)
class OwnerPlaces:
    """Where the examples of persons are in a batch: K places in a row for each.

    Attributes
    ----------
    per_owner : int
        K.
    usable : Tensor of bool, shape (k K,), optional
        False for empty places. What stands in one must be of the same person, or of
        nobody: it counts with weight 0, and zero times infinity is not zero.
    """

    per_owner: int
    usable: torch.Tensor | None = None

    def find_counted(self, losses: torch.Tensor) -> torch.Tensor:
        """Return which places count: those with a usable example and a finite loss."""
        finite = losses.isfinite()
        return finite if self.usable is None else finite & self.usable

    def count_each(self, losses: torch.Tensor) -> torch.Tensor:
        """Return how many places of each person count, and at least 1; (k,)."""
        counted = self.find_counted(losses).view(-1, self.per_owner)
        return counted.sum(dim=1).clamp(min=1)

    def weigh(self, losses: torch.Tensor) -> torch.Tensor:
        """Return the weight of each place in the mean of its person, (k K,)."""
        counted = self.find_counted(losses).view(-1, self.per_owner)
        return (counted / counted.sum(dim=1, keepdim=True).clamp(min=1)).flatten()


class PerExampleBackward:
    """One example after the other, each with the state that the model was given in.

    Parameters
    ----------
    module : nn.Module
        A copy of the model, which the pass may change.
    loss : PerExampleLoss
    dtype : torch.dtype
        Of the sum.

    Attributes
    ----------
    slices : dict from trained parameters to slices
        Where they are in the sum.
    elements_per_example : int
        Elements that are held for every example until the sum.
    lock : Lock
        To be held from setting weights to having the parts: models that are built alike
        share a pass, and threads may train several of them.
    """

    description = "one at a time"  # for people

    def __init__(
        self, module: nn.Module, loss: PerExampleLoss, dtype: torch.dtype
    ) -> None:
        self.module, self.loss, self.dtype = module, loss, dtype
        self.parameters, self.buffers = [*module.parameters()], [*module.buffers()]
        self._plain_layers = [m for m in module.modules() if _holds_only_parameters(m)]
        self.slices: dict[nn.Parameter, slice] = {}
        self.elements_per_example = 0
        self._usual_time = 0.0
        self.lock = Lock()
        for parameter in self.parameters:
            if parameter.requires_grad:
                start = self.elements_per_example
                self.elements_per_example += parameter.numel()
                self.slices[parameter] = slice(start, self.elements_per_example)

    def prepare(self, made_up: Example) -> None:
        """Learn from made-up examples what the model alone does not tell."""
        start = time.perf_counter()
        self.compute_gradient(*(index_batch(part, slice(0, 1)) for part in made_up))
        self._usual_time = time.perf_counter() - start

    def make_copy(self) -> tuple[nn.Module, PerExampleLoss, list[nn.Parameter]]:
        """Return copies of module and loss that share no state, and what is trained.

        Memory of parameters and buffers is copied when something writes to it.
        """
        tensors = (*self.parameters, *self.buffers, *self.loss.list_tensors())
        copies: dict[int, object] = {id(t): _copy_on_write(t) for t in tensors}
        copies |= {id(m): _copy_plain_layer(m, copies) for m in self._plain_layers}
        module, loss = copy.deepcopy((self.module, self.loss), copies)
        return module, loss, [cast(nn.Parameter, copies[id(p)]) for p in self.slices]

    def run(
        self, inputs: Batch, targets: Batch, places: OwnerPlaces | None = None
    ) -> tuple[Parts, torch.Tensor]:
        """Return the gradients of k examples, in parts, and their losses, (k,).

        An example without a finite loss cannot be used. With `places` the gradients are
        the means over each person's examples.
        """
        # Anomaly detection would end the pass for all at the first gradient of one
        # example that is not a number.
        normal: AbstractContextManager[object] = nullcontext()
        if torch.is_anomaly_enabled():
            normal = torch.autograd.set_detect_anomaly(False)
        with torch.enable_grad(), normal:
            return self.compute_parts(inputs, targets, places)

    def count_elements(self, per_owner: int) -> int:
        """Return how many elements are held for every person until the sum."""
        return self.elements_per_example

    def compute_parts(
        self, inputs: Batch, targets: Batch, places: OwnerPlaces | None = None
    ) -> tuple[Parts, torch.Tensor]:
        """Return what `run` returns, one example after the other."""
        count = count_examples(targets)
        per_owner = 1 if places is None else places.per_owner
        # The last row is for empty places, which take the time of others.
        rows = count // per_owner + 1
        gradients = torch.zeros(rows, self.elements_per_example, dtype=self.dtype)
        losses = torch.full((count,), torch.nan)
        padding = TimePadding(self._usual_time)
        with separate_streams(count) as start_stream:
            for i in range(count):
                one = slice(i, i + 1)
                start_stream(i)
                with padding.time_example():
                    gradient, losses[i] = self.compute_gradient(
                        index_batch(inputs, one), index_batch(targets, one)
                    )
                    counts = places is None or bool(places.find_counted(losses)[i])
                    gradients[i // per_owner if counts else -1] += gradient
        padding.wait()
        gradients = gradients[:-1]
        if places is not None:
            gradients /= places.count_each(losses).unsqueeze(1)
        return [GradientPart(gradients, slice(0, self.elements_per_example))], losses

    def compute_gradient(
        self, inputs: Batch, targets: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradient of one example, (d,), and its loss, ()."""
        module, loss, trained = self.make_copy()
        with TotalFunctions():
            outputs = call_model(module, copy_batch(inputs))
            value = loss(outputs, copy_batch(targets)).sum()
        found = torch.autograd.grad(
            value, trained, allow_unused=True, materialize_grads=True
        )
        return torch.cat([g.flatten().to(self.dtype) for g in found]), value.detach()


class BatchedBackward(PerExampleBackward):
    """All examples at once."""

    def prepare(self, made_up: Example) -> None:
        """Choose with vmap or without, and hook the layers that the model calls."""
        if torch.__version__ < "2.13":  # it loads its compiler late, under vmap
            torch.compiler.disable()  # type: ignore[no-untyped-call]
        self._plain, takes_rows_always = is_rowwise(self.module), [True]
        self._vmap_tokens: list[torch.Tensor] = []
        self._unhooked: dict[str, nn.Parameter] = {}
        layers = [*self.module.modules()]
        # Not `layer.parameters()`, which lists a parameter with two names once.
        own = {
            layer: [p for p in layer._parameters.values() if p is not None]
            for layer in layers
        }
        owners = Counter(p for parameters in own.values() for p in parameters)
        self._hooked = [
            HookedLayer(layer, self.slices, self.dtype, self._vmap_tokens)
            for layer in layers
            if has_formula(layer)
            and any(p in self.slices for p in own[layer])
            and all(owners[p] == 1 for p in own[layer])
        ]
        hooks = [
            layer.register_forward_pre_hook(
                lambda layer, given: takes_rows_always.append(
                    takes_rows(layer, given[0])
                )
            )
            for layer in layers
            if self._plain
        ]
        if self._plain:
            with TotalFunctions() as guard:
                self.module(copy_batch(made_up[0]))
        self._guarded = not self._plain or guard.used
        self._compute_losses(*made_up)
        for hook in hooks:
            hook.remove()
        for unused in [hooked.layer for hooked in self._hooked if not hooked.uses]:
            del unused.forward
        self._hooked = [hooked for hooked in self._hooked if hooked.uses]
        hooked_parameters = {p for hooked in self._hooked for p in own[hooked.layer]}
        self._unhooked = {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if parameter in self.slices and parameter not in hooked_parameters
        }
        self._plain &= all(takes_rows_always) and not self._unhooked
        self.description = "known layers" if self._plain else "torch.vmap"
        self.elements_per_example = sum(
            part.g.shape[1]
            for part in self.compute_parts(*made_up)[0]
            if isinstance(part, GradientPart) and part.inputs is None
        )

    def count_elements(self, per_owner: int) -> int:
        """Return how many elements are held for every person until the sum."""
        if per_owner == 1:
            return self.elements_per_example
        copied = sum(p.numel() for p in self._unhooked.values())
        return copied * per_owner + sum(p.numel() for p in self.slices)

    def compute_parts(
        self, inputs: Batch, targets: Batch, places: OwnerPlaces | None = None
    ) -> tuple[Parts, torch.Tensor]:
        """Return what `run` returns, all examples at once."""
        losses, copies = self._compute_losses(inputs, targets)
        total, per_owner = losses.sum(), 1
        if places is not None:
            total = (losses * places.weigh(losses.detach())).sum()
            per_owner = places.per_owner
        count = losses.shape[0] // per_owner
        edges = [edge for hooked in self._hooked for _, edge in hooked.uses]
        wanted: Sequence[torch.Tensor] = [*edges, *copies.values()]  # type: ignore[list-item]  # torch takes both
        found: list[torch.Tensor | None]
        # With gradients given for `losses`, torch would import sympy here.
        found = list(torch.autograd.grad(total, wanted, allow_unused=True))
        parts: Parts = []
        for name in reversed(copies):
            if (g := found.pop()) is not None:
                place = self.slices[self._unhooked[name]]
                g = g.flatten(1).to(self.dtype)
                if per_owner > 1:
                    g = g.view(count, per_owner, -1).sum(dim=1)
                parts.append(GradientPart(g, place))
        for hooked in reversed(self._hooked):
            parts += hooked.pop_parts(count, found, per_owner)
        return parts, losses.detach()

    def _compute_losses(
        self, inputs: Batch, targets: Batch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the losses, (k,), and the copies of the parameters without a hook."""
        for hooked in self._hooked:
            hooked.uses.clear()
        guard = TotalFunctions() if self._guarded else nullcontext()
        if self._plain:
            with guard:
                outputs = self.module(inputs)
            if self.loss.is_rowwise:
                return self.loss(outputs, targets), {}
            loss = torch.vmap(copy.deepcopy(self.loss), randomness="different")
            outputs, targets = unsqueeze_batch(outputs, 1), unsqueeze_batch(targets, 1)
            return loss(outputs, targets).squeeze(1), {}
        first = tensors_of(targets)[0]
        copies = {
            name: p.detach().expand(len(first), *p.shape).requires_grad_()
            for name, p in self._unhooked.items()
        }
        tokens = torch.zeros(len(first), device=first.device)
        module, loss, _ = self.make_copy()
        one = functools.partial(self._compute_loss, module, loss)
        each = torch.vmap(one, randomness="different")
        try:
            # The only attention that vmap computes for all examples at once.
            with sdpa_kernel(SDPBackend.MATH), guard:
                return each(tokens, copies, inputs, targets), copies
        finally:
            self._vmap_tokens.clear()

    def _compute_loss(
        self,
        module: nn.Module,
        loss: PerExampleLoss,
        token: torch.Tensor,
        weights: dict[str, torch.Tensor],
        inputs: Batch,
        targets: Batch,
    ) -> torch.Tensor:
        """Return the loss of one example, which the model gets as a batch of one."""
        self._vmap_tokens[:] = [token]
        outputs = call_model(module, unsqueeze_batch(inputs, 0), weights)
        return loss(outputs, unsqueeze_batch(targets, 0)).squeeze(0)


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Take numbers below the normal ones for zero, as far as the processor can.

    They take up to 35 times as long as others, so the time of a step could tell of an
    example or of a server's weights. The bounds in `clipped_sum` allow for it.
    """
    already = sys.float_info.min * 0.5 == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(already)


def call_model(
    module: nn.Module, inputs: Batch, weights: dict[str, torch.Tensor] | None = None
) -> Batch:
    """Call a model, with some `weights` in place of its own.

    A dict is given as keywords, where the model takes such keywords; everything else
    is its one argument.
    """
    arguments: tuple[Batch, ...] = (inputs,)
    keywords: dict[str, Batch] = {}
    if isinstance(inputs, dict):
        with suppress(TypeError):
            inspect.signature(module.forward).bind(**inputs)
            arguments, keywords = (), inputs
    return cast(Batch, functional_call(module, weights or {}, arguments, keywords))


def _holds_only_parameters(layer: nn.Module) -> bool:
    """Return whether a layer holds nothing but parameters that could be changed."""
    return type(layer).__module__.startswith("torch.nn.modules.") and all(
        name == "_parameters"
        or isinstance(value, int | float | str | FunctionType | None)
        or (isinstance(value, tuple) and all(isinstance(n, int) for n in value))
        or (isinstance(value, dict | set) and not value)
        for name, value in vars(layer).items()
    )


def _copy_plain_layer(layer: nn.Module, copies: Mapping[int, object]) -> nn.Module:
    """Copy a layer of parameters, in a tenth of the time of a deep copy."""
    made = object.__new__(type(layer))
    for name, value in vars(layer).items():
        vars(made)[name] = value.copy() if isinstance(value, dict | set) else value
    own = vars(made)["_parameters"]
    own.update((name, copies[id(p)]) for name, p in own.items() if p is not None)
    return made


def _copy_on_write(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose memory is copied when one of the two is written to."""
    held = tensor.detach()
    try:
        made = torch._lazy_clone(held)
    except (AttributeError, RuntimeError):  # not for every kind of memory
        made = held.clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made

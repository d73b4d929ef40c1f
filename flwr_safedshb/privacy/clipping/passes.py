"""How a batch goes through a model so that no example meets another.

Three ways to every example's gradient; none mixes them, whatever they and weights are:

- `Together`, plainly: a sequence of torch's own layers that are known to treat every
  example by itself (`known`);
- `Together`, under `torch.vmap`: any other model sees one example at a time, as a batch
  of one, while the work is done for all of them at once;
- `Pass`: one example after the other, for what `torch.vmap` does not cover.

`Together` watches the layers that have a formula (`layers`), in one backward pass.
Every other parameter gets a copy for each example, and so a gradient for each.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from types import FunctionType
from typing import cast

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from flwr_safedshb.privacy.clipping.known import has_formula, rowwise, takes_rows
from flwr_safedshb.privacy.clipping.layers import Parts, Watched
from flwr_safedshb.privacy.clipping.sums import Part
from flwr_safedshb.privacy.examples import (
    Batch,
    Example,
    apart,
    as_batch,
    rows,
    tensors_of,
)
from flwr_safedshb.privacy.losses import PerExampleLoss
from flwr_safedshb.privacy.unusable import log_unusable


class Pass:
    """One example after the other, each with the state that the model was given in.

    Parameters
    ----------
    module : nn.Module
        A copy of the model, which the pass may change.
    loss : PerExampleLoss
    dtype : torch.dtype
        In which is summed.

    Attributes
    ----------
    places : dict from parameters that are trained to slices
        Where they are in the sum.
    held : int
        Elements that every example takes until the sum.
    random : bool
        Whether it draws random numbers.
    """

    words = "one at a time"  # for people

    def __init__(
        self, module: nn.Module, loss: PerExampleLoss, dtype: torch.dtype
    ) -> None:
        self.module, self.loss, self.dtype = module, loss, dtype
        self.parameters, self.buffers = [*module.parameters()], [*module.buffers()]
        self.random = True
        self._light = [layer for layer in module.modules() if _is_light(layer)]
        self.places: dict[nn.Parameter, slice] = {}
        self.held = 0
        for parameter in self.parameters:
            if parameter.requires_grad:
                start, self.held = self.held, self.held + parameter.numel()
                self.places[parameter] = slice(start, self.held)

    def settle(self, made_up: Example) -> None:
        """Decide by made-up examples what the model alone does not say."""

    def fresh(self) -> tuple[nn.Module, PerExampleLoss]:
        """Return copies of module and loss that share the parameters, and no state.

        Whatever examples leave behind in them, no other example ever sees.
        """
        shared: dict[int, object] = {id(p): p for p in self.parameters}
        shared |= {id(layer): _lightly_copied(layer) for layer in self._light}
        return copy.deepcopy((self.module, self.loss), shared)

    def run(self, batch: Sequence[Batch], seed: int | None) -> Parts:
        """Return the parts of inputs and targets, in a random state of their own."""
        own = torch.random.fork_rng(devices=[], enabled=seed is not None)
        with torch.enable_grad(), own:  # also where gradients were turned off
            if seed is not None:
                torch.manual_seed(seed)
            return self.parts(*batch)

    def parts(self, inputs: Batch, targets: Batch) -> Parts:
        """Return the gradients of k examples, NaN for one that cannot be used."""
        gradients = []
        seeds = torch.randint(2**62, (len(tensors_of(targets)[0]),)).tolist()
        for i, seed in enumerate(seeds):
            one = slice(i, i + 1)
            torch.manual_seed(seed)  # whatever the examples before have drawn
            try:
                gradients.append(self.gradient(rows(inputs, one), rows(targets, one)))
            except Exception as error:
                log_unusable(1, error)
                gradients.append(torch.full((self.held,), torch.nan, dtype=self.dtype))
        return [Part(torch.stack(gradients), slice(0, self.held))]

    def gradient(self, inputs: Batch, targets: Batch) -> torch.Tensor:
        """Return the gradient of one example, (d,)."""
        module, loss = self.fresh()
        found = torch.autograd.grad(
            loss(called(module, inputs), targets).sum(),
            list(self.places),
            allow_unused=True,
            materialize_grads=True,
        )
        return torch.cat([g.flatten().to(self.dtype) for g in found])


class Together(Pass):
    """All examples at once."""

    def settle(self, made_up: Example) -> None:
        """Watch layers that are called, and that take the first axis for examples."""
        if torch.__version__ < "2.13":  # it loads its compiler late, under vmap
            torch.compiler.disable()  # type: ignore[no-untyped-call]
        self._plain, seen = rowwise(self.module), [True]
        self._tickets: list[torch.Tensor] = []
        self._loose: dict[str, nn.Parameter] = {}
        owners = Counter(p for layer in self.module.modules() for p in _own(layer))
        self._watched = [
            Watched(layer, self.places, self.dtype, self._tickets)
            for layer in self.module.modules()
            if has_formula(layer)
            and any(p in self.places for p in _own(layer))
            and all(owners[p] == 1 for p in _own(layer))
        ]
        hooks = [
            layer.register_forward_pre_hook(
                lambda layer, given: seen.append(takes_rows(layer, given[0]))
            )
            for layer in self.module.modules()
            if self._plain
        ]
        self._losses(*made_up)
        for hook in hooks:
            hook.remove()
        for unused in [each.layer for each in self._watched if not each.uses]:
            del unused.forward
        self._watched = [each for each in self._watched if each.uses]
        watched = {p for each in self._watched for p in _own(each.layer)}
        # The parameters that no watched layer takes care of.
        self._loose = {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if parameter in self.places and parameter not in watched
        }
        self._plain &= all(seen) and not self._loose
        self.words = "known layers" if self._plain else "torch.vmap"
        self.held = sum(
            part.g.shape[1]
            for part in self.parts(*made_up)
            if isinstance(part, Part) and part.inputs is None
        )

    def parts(self, inputs: Batch, targets: Batch) -> Parts:
        """Return the gradients of k examples; raises what model or loss raise."""
        losses, copies = self._losses(inputs, targets)
        edges = [edge for each in self._watched for _, edge in each.uses]
        wanted: Sequence[torch.Tensor] = [*edges, *copies.values()]  # type: ignore[list-item]  # torch takes both
        found: list[torch.Tensor | None]
        # Of given gradients torch would be slower at the first, by all of sympy.
        found = list(torch.autograd.grad(losses.sum(), wanted, allow_unused=True))
        parts: Parts = []
        for name in reversed(copies):
            if (g := found.pop()) is not None:
                place = self.places[self._loose[name]]
                parts.append(Part(g.flatten(1).to(self.dtype), place))
        for watched in reversed(self._watched):
            parts += watched.parts(losses.shape[0], found)
        return parts

    def _losses(
        self, inputs: Batch, targets: Batch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the losses, (k,), and the copies of the loose parameters."""
        for watched in self._watched:
            watched.uses.clear()
        if self._plain:
            outputs = self.module(inputs)
            if self.loss.elementary:
                return self.loss(outputs, targets), {}
            apiece = torch.vmap(self.loss)(apart(outputs), apart(targets))
            return apiece.squeeze(1), {}
        first = tensors_of(targets)[0]
        copies = {
            name: p.detach().expand(len(first), *p.shape).requires_grad_()
            for name, p in self._loose.items()
        }
        tickets = torch.zeros(len(first), device=first.device)
        one = functools.partial(self._one, *self.fresh())
        each = torch.vmap(one, randomness="different")
        try:
            # The one attention that vmap does for all examples at once.
            with sdpa_kernel(SDPBackend.MATH):
                return each(tickets, copies, inputs, targets), copies
        finally:
            self._tickets.clear()

    def _one(
        self,
        module: nn.Module,
        loss: PerExampleLoss,
        ticket: torch.Tensor,
        weights: dict[str, torch.Tensor],
        inputs: Batch,
        targets: Batch,
    ) -> torch.Tensor:
        """Return the loss of one example, which the model gets as a batch of one."""
        self._tickets[:] = [ticket]
        outputs = called(module, as_batch(inputs), weights)
        return loss(outputs, as_batch(targets)).squeeze(0)


def called(
    module: nn.Module, inputs: Batch, weights: dict[str, torch.Tensor] | None = None
) -> Batch:
    """Return what a model makes of inputs, with some `weights` in place of its own.

    A dict is given as keywords, where the model takes such keywords; everything else
    is its one argument.
    """
    given: tuple[Batch, ...] = (inputs,)
    keywords: dict[str, Batch] = {}
    if isinstance(inputs, dict):
        with suppress(TypeError):
            inspect.signature(module.forward).bind(**inputs)
            given, keywords = (), inputs
    return cast(Batch, functional_call(module, weights or {}, given, keywords))


def _is_light(layer: nn.Module) -> bool:
    """Say whether a layer holds nothing but parameters that could be changed in it."""
    return type(layer).__module__.startswith("torch.nn.modules.") and all(
        name == "_parameters"
        or isinstance(value, int | float | str | FunctionType | None)
        or (isinstance(value, tuple) and all(isinstance(n, int) for n in value))
        or (isinstance(value, dict | set) and not value)
        for name, value in vars(layer).items()
    )


def _lightly_copied(layer: nn.Module) -> nn.Module:
    """Return a copy of a light layer, in a tenth of the time of a deep one."""
    copied = object.__new__(type(layer))
    for name, value in vars(layer).items():
        vars(copied)[name] = value.copy() if isinstance(value, dict | set) else value
    return copied


def _own(layer: nn.Module) -> list[nn.Parameter]:
    return [p for p in layer._parameters.values() if p is not None]

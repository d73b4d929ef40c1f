"""How a batch goes through a model so that no example meets another.

There are three ways to the gradient of every example. Which one a model takes is
decided before the first round, by its types and its operations, and never by data or
weights:

- `Together`, plainly: a sequence of torch's own layers that are known to treat every
  example by itself (`known`);
- `Together`, under `torch.vmap`: any other model whose operations are all total
  (`total`) sees one example at a time, as a batch of one, while the work is done for
  all of them at once;
- `Pass`: one example after the other, for everything else.

`Together` hooks the layers that have a formula (`layers`), in one backward pass.
Every other parameter gets a copy for each example, and so a gradient for each.

What one example leaves behind reaches no other:

- every call works on copies of the inputs, so that a layer may work in place;
- under `Pass` every example has a copy of the model and of the loss. Parameters and
  buffers are copied on write, so that a frozen base model costs nothing;
- under `torch.vmap` values of examples cannot be written to anything that is shared;
- models that change their own parameters or buffers are refused beforehand (`checks`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    suppress,
)
from threading import Lock
from types import FunctionType
from typing import cast

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from flwr_safedshb.privacy.bad_examples import TimePadding
from flwr_safedshb.privacy.clipping.clipped_sum import GradientPart
from flwr_safedshb.privacy.clipping.ghost_norms import HookedLayer, Parts
from flwr_safedshb.privacy.clipping.total_losses import TotalFunctions
from flwr_safedshb.privacy.clipping.whitelist import has_formula, is_rowwise, takes_rows
from flwr_safedshb.privacy.datasets import (
    Batch,
    Example,
    index_batch,
    map_tensors,
    tensors_of,
    unsqueeze_batch,
)
from flwr_safedshb.privacy.losses import PerExampleLoss
from flwr_safedshb.privacy.randomness.streams import separate_streams


class PerExampleBackward:
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
    lock : Lock
        To be held from giving it weights to having its parts: models that are built
        alike share a pass, and threads may train several of them.
    """

    words = "one at a time"  # for people

    def __init__(
        self, module: nn.Module, loss: PerExampleLoss, dtype: torch.dtype
    ) -> None:
        self.module, self.loss, self.dtype = module, loss, dtype
        self.parameters, self.buffers = [*module.parameters()], [*module.buffers()]
        self._light = [layer for layer in module.modules() if _is_light(layer)]
        self.places: dict[nn.Parameter, slice] = {}
        self.held = 0
        self._usual_time = 0.0
        self.lock = Lock()
        for parameter in self.parameters:
            if parameter.requires_grad:
                start, self.held = self.held, self.held + parameter.numel()
                self.places[parameter] = slice(start, self.held)

    def settle(self, made_up: Example) -> None:
        """Decide by made-up examples what the model alone does not say."""
        start = time.perf_counter()
        self.gradient(*(index_batch(part, slice(0, 1)) for part in made_up))
        self._usual_time = time.perf_counter() - start

    def make_copy(self) -> tuple[nn.Module, PerExampleLoss, list[nn.Parameter]]:
        """Return copies of module and loss that share no state, and what is trained.

        Memory of parameters and buffers is copied when something writes to it.
        """
        of_loss = [*self.loss.parameters(), *self.loss.buffers()]
        shared: dict[int, object] = {
            id(tensor): _copy_on_write(tensor)
            for tensor in (*self.parameters, *self.buffers, *of_loss)
        }
        shared |= {id(layer): _copy_lightly(layer, shared) for layer in self._light}
        module, loss = copy.deepcopy((self.module, self.loss), shared)
        return module, loss, [cast(nn.Parameter, shared[id(p)]) for p in self.places]

    def run(self, inputs: Batch, targets: Batch) -> tuple[Parts, torch.Tensor]:
        """Return the parts of k examples, and their losses, (k,).

        An example without a finite loss is none that can be used.
        """
        # Whatever is set around a node: with anomaly detection, the gradient of one
        # example that is not a number would end the pass for all.
        calm: AbstractContextManager[object] = nullcontext()
        if torch.is_anomaly_enabled():
            calm = torch.autograd.set_detect_anomaly(False)
        with torch.enable_grad(), calm:
            return self.parts(inputs, targets)

    def parts(self, inputs: Batch, targets: Batch) -> tuple[Parts, torch.Tensor]:
        """Return as `run`, one example after the other."""
        count = len(tensors_of(targets)[0])
        gradients = torch.zeros(count, self.held, dtype=self.dtype)
        losses = torch.full((count,), torch.nan)
        even = TimePadding(self._usual_time)
        with separate_streams(count) as start:
            for i in range(count):
                one = slice(i, i + 1)
                start(i)
                with even.example():
                    found = self.gradient(
                        index_batch(inputs, one), index_batch(targets, one)
                    )
                    gradients[i], losses[i] = found
        even.wait()
        return [GradientPart(gradients, slice(0, self.held))], losses

    def gradient(
        self, inputs: Batch, targets: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradient of one example, (d,), and its loss, ()."""
        module, loss, trained = self.make_copy()
        with TotalFunctions():
            value = loss(
                call_model(module, copy_batch(inputs)), copy_batch(targets)
            ).sum()
        found = torch.autograd.grad(
            value, trained, allow_unused=True, materialize_grads=True
        )
        return torch.cat([g.flatten().to(self.dtype) for g in found]), value.detach()


class BatchedBackward(PerExampleBackward):
    """All examples at once."""

    def settle(self, made_up: Example) -> None:
        """Watch layers that are called, and that take the first axis for examples."""
        if torch.__version__ < "2.13":  # it loads its compiler late, under vmap
            torch.compiler.disable()  # type: ignore[no-untyped-call]
        self._plain, seen = is_rowwise(self.module), [True]
        self._tickets: list[torch.Tensor] = []
        self._loose: dict[str, nn.Parameter] = {}
        owners = Counter(p for layer in self.module.modules() for p in _own(layer))
        self._watched = [
            HookedLayer(layer, self.places, self.dtype, self._tickets)
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
        if self._plain:
            with TotalFunctions() as guard:
                self.module(copy_batch(made_up[0]))
        self._guarded = not self._plain or guard.used
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
            for part in self.parts(*made_up)[0]
            if isinstance(part, GradientPart) and part.inputs is None
        )

    def parts(self, inputs: Batch, targets: Batch) -> tuple[Parts, torch.Tensor]:
        """Return as `run`, all examples at once."""
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
                parts.append(GradientPart(g.flatten(1).to(self.dtype), place))
        for watched in reversed(self._watched):
            parts += watched.parts(losses.shape[0], found)
        return parts, losses.detach()

    def _losses(
        self, inputs: Batch, targets: Batch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the losses, (k,), and the copies of the loose parameters."""
        for watched in self._watched:
            watched.uses.clear()
        if self._plain:
            with self._guard():
                outputs = self.module(inputs)
            if self.loss.is_rowwise:
                return self.loss(outputs, targets), {}
            loss = torch.vmap(copy.deepcopy(self.loss), randomness="different")
            return loss(
                unsqueeze_batch(outputs, 1), unsqueeze_batch(targets, 1)
            ).squeeze(1), {}
        first = tensors_of(targets)[0]
        copies = {
            name: p.detach().expand(len(first), *p.shape).requires_grad_()
            for name, p in self._loose.items()
        }
        tickets = torch.zeros(len(first), device=first.device)
        module, loss, _ = self.make_copy()
        one = functools.partial(self._one, module, loss)
        each = torch.vmap(one, randomness="different")
        try:
            # The one attention that vmap does for all examples at once.
            with sdpa_kernel(SDPBackend.MATH), self._guard():
                return each(tickets, copies, inputs, targets), copies
        finally:
            self._tickets.clear()

    def _guard(self) -> AbstractContextManager[object]:
        """Return what replaces functions by total ones, if the model has any."""
        return TotalFunctions() if self._guarded else nullcontext()

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
        outputs = call_model(module, unsqueeze_batch(inputs, 0), weights)
        return loss(outputs, unsqueeze_batch(targets, 0)).squeeze(0)


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Take numbers below the normal ones for zero, as far as the processor can.

    To compute with them takes up to 35 times as long, so an example or a server's
    weights could be told by the time of a step. The bounds in `sums` allow for it.
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


def _copy_lightly(layer: nn.Module, shared: Mapping[int, object]) -> nn.Module:
    """Return a copy of a light layer, in a tenth of the time of a deep one."""
    made = object.__new__(type(layer))
    for name, value in vars(layer).items():
        vars(made)[name] = value.copy() if isinstance(value, dict | set) else value
    own = vars(made)["_parameters"]
    own.update((name, shared[id(p)]) for name, p in own.items() if p is not None)
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


def copy_batch(batch: Batch) -> Batch:
    """Return a batch whose memory nobody else has."""
    return map_tensors(lambda tensor: tensor.detach().clone(), batch)


def _own(layer: nn.Module) -> list[nn.Parameter]:
    return [p for p in layer._parameters.values() if p is not None]

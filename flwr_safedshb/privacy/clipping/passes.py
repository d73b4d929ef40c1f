"""How a batch goes through a model so that no example meets another.

Three ways to the gradients of every example; none can mix examples, whatever they and
the weights are:

- `Together`, plainly: a sequence of torch's own layers that are known to treat every
  example by itself (`known`);
- `Together`, under `torch.vmap`: any other model sees one example at a time, as a batch
  of one, while the work is done for all of them at once;
- `Alone`: one example after the other, for what `torch.vmap` does not cover.

`Together` watches the layers that have a formula, in one backward pass. Every other
parameter gets a copy for each example, so that autograd returns a gradient for each.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from flwr_safedshb.privacy.clipping.batches import Batch, leaves, mapped, rows
from flwr_safedshb.privacy.clipping.formulas import FORMULAS, Seen
from flwr_safedshb.privacy.clipping.known import has_formula, rowwise, takes_rows
from flwr_safedshb.privacy.clipping.losses import PerExampleLoss, log_unusable
from flwr_safedshb.privacy.clipping.parts import Held
from flwr_safedshb.privacy.clipping.sums import Part
from flwr_safedshb.privacy.clipping.watch import Watch


class Pass:
    """A way to the gradients of every example.

    Parameters
    ----------
    module : nn.Module
        A copy of the model, which the pass may change.
    loss : PerExampleLoss
    dtype : torch.dtype
        In which is summed.

    Attributes
    ----------
    parameters, buffers : list of Tensor
        Those of the module.
    places : dict from parameters that are trained to slices
        Where they are in the sum.
    held : int
        Elements that every example takes until the sum.
    random : bool
        Whether it draws random numbers.
    """

    def __init__(
        self, module: nn.Module, loss: PerExampleLoss, dtype: torch.dtype
    ) -> None:
        self.module, self.loss, self.dtype = module, loss, dtype
        self.parameters, self.buffers = [*module.parameters()], [*module.buffers()]
        self.random = True
        self.places: dict[nn.Parameter, slice] = {}
        stop = 0
        for parameter in self.parameters:
            if parameter.requires_grad:
                start, stop = stop, stop + parameter.numel()
                self.places[parameter] = slice(start, stop)
        self.held = stop

    @property
    def words(self) -> str:
        """What it is, for people."""
        return "one at a time"

    def settle(self, inputs: Batch, targets: Batch) -> None:
        """Decide by made-up examples what the model alone does not say."""

    def fresh(self) -> tuple[nn.Module, PerExampleLoss]:
        """Return copies of module and loss that share the parameters, and no state.

        Whatever examples leave behind in them, no other example ever sees.
        """
        shared = {id(p): p for p in self.parameters}
        return copy.deepcopy((self.module, self.loss), shared)

    def parts(self, inputs: Batch, targets: Batch) -> list[Part]:
        """Return the gradients of k examples; raises what model or loss raise."""
        raise NotImplementedError

    def run(self, batch: Sequence[Batch], seed: int | None) -> list[Part]:
        """Return the parts of inputs and targets, in a random state of their own."""
        if seed is None:
            return self.parts(*batch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.parts(*batch)

    def usable(self, batch: Sequence[Batch], seed: int | None) -> torch.Tensor:
        """Say which examples the model and the loss can take, (k,) of bool.

        Each is asked in a batch as large, and in the same random state.
        """
        count = len(leaves(batch[1])[0])
        good = torch.ones(count, dtype=torch.bool)

        def look(some: torch.Tensor) -> None:
            places = some.repeat(-(-count // len(some)))[:count]
            try:
                self.run([rows(part, places) for part in batch], seed)
            except Exception:
                half = len(some) // 2
                if half == 0:
                    good[some] = False
                else:
                    look(some[:half])
                    look(some[half:])

        look(torch.arange(count))
        return good


class Together(Pass):
    """All examples at once."""

    def __init__(
        self, module: nn.Module, loss: PerExampleLoss, dtype: torch.dtype
    ) -> None:
        super().__init__(module, loss, dtype)
        self._plain = rowwise(module)
        self._rooms: dict[nn.Module, torch.Tensor] = {}
        owners = Counter(p for layer in module.modules() for p in _own(layer))
        self._watch = Watch(
            [
                layer
                for layer in module.modules()
                if has_formula(layer)
                and any(p in self.places for p in _own(layer))
                and all(owners[p] == 1 for p in _own(layer))
            ]
        )
        self._find_loose()

    @property
    def words(self) -> str:
        """What it is, for people."""
        return "known layers" if self._plain else "torch.vmap"

    def _find_loose(self) -> None:
        """Find the parameters that no watched layer takes care of."""
        watched = {p for layer in self._watch.layers for p in _own(layer)}
        self._loose = {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if parameter in self.places and parameter not in watched
        }
        self._plain &= not self._loose

    def settle(self, inputs: Batch, targets: Batch) -> None:
        """Find layers that are not called, or that take the examples for channels."""
        seen: list[bool] = []
        hooks = [
            layer.register_forward_pre_hook(
                lambda layer, given: seen.append(takes_rows(layer, given[0]))
            )
            for layer in self.module.modules()
            if self._plain
        ]
        self._losses(inputs, targets)
        for hook in hooks:
            hook.remove()
        self._plain &= all(seen)
        self._watch.ignore_unused()
        self._find_loose()
        parts = self.parts(inputs, targets)
        self.held = sum(part.size for part in parts if isinstance(part, Held))

    def parts(self, inputs: Batch, targets: Batch) -> list[Part]:
        """Return the gradients of k examples; raises what model or loss raise."""
        losses, copies = self._losses(inputs, targets)
        wanted: Sequence[torch.Tensor] = [*self._watch.outputs(), *copies.values()]  # type: ignore[list-item]  # torch takes both
        found = list(torch.autograd.grad(losses.sum(), wanted, allow_unused=True))
        parts: list[Part] = []
        for name in reversed(copies):
            g = found.pop()
            if g is not None:
                place = self.places[self._loose[name]]
                parts.append(Held(g.flatten(1).to(self.dtype), place))
        for layer, uses in self._watch.pairs([*found]):
            own = layer._parameters.items()
            at = {name: self.places[p] for name, p in own if p in self.places}
            room = functools.partial(self._room, layer)
            seen = Seen(uses, len(losses), at, self.dtype, room)
            parts += FORMULAS[type(layer).forward](layer, seen)
        return parts

    def _losses(
        self, inputs: Batch, targets: Batch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the losses, (k,), and the copies of the loose parameters."""
        self._watch.clear()
        if self._plain:
            outputs = self.module(inputs)
            if self.loss.elementary:
                return self.loss(outputs, targets), {}
            return torch.vmap(self._loss_of_one)(outputs, targets), {}
        first = leaves(targets)[0]
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
            self._watch.ticket = None

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
        self._watch.ticket = ticket
        outputs = functional_call(module, weights, (_as_batch(inputs),))
        return loss(outputs, _as_batch(targets)).squeeze(0)

    def _loss_of_one(self, outputs: torch.Tensor, targets: Batch) -> torch.Tensor:
        return self.loss(_as_batch(outputs), _as_batch(targets)).squeeze(0)

    def _room(self, layer: nn.Module, elements: int) -> torch.Tensor:
        """Return memory that stays: new memory costs more than what is done in it."""
        room = self._rooms.get(layer)
        if room is None or len(room) < elements:
            device = self.parameters[0].device
            room = torch.empty(elements, dtype=self.dtype, device=device)
            self._rooms[layer] = room
        return room[:elements]


class Alone(Pass):
    """One example after the other, each with the state that the model was given in."""

    def parts(self, inputs: Batch, targets: Batch) -> list[Part]:
        """Return the gradients of k examples, NaN for one that cannot be used."""
        gradients = []
        seeds = torch.randint(2**62, (len(leaves(targets)[0]),)).tolist()
        for i, seed in enumerate(seeds):
            one = slice(i, i + 1)
            torch.manual_seed(seed)  # whatever the examples before have drawn
            try:
                gradients.append(self.gradient(rows(inputs, one), rows(targets, one)))
            except Exception as error:
                log_unusable(1, error)
                gradients.append(torch.full((self.held,), torch.nan, dtype=self.dtype))
        return [Held(torch.stack(gradients), slice(0, self.held))]

    def gradient(self, inputs: Batch, targets: Batch) -> torch.Tensor:
        """Return the gradient of one example, (d,)."""
        module, loss = self.fresh()
        found = torch.autograd.grad(
            loss(module(inputs), targets).sum(),
            list(self.places),
            allow_unused=True,
            materialize_grads=True,
        )
        return torch.cat([g.flatten().to(self.dtype) for g in found])


def _as_batch(one: Batch) -> Batch:
    return mapped(lambda tensor: tensor.unsqueeze(0), one)


def _own(layer: nn.Module) -> list[nn.Parameter]:
    return [p for p in layer._parameters.values() if p is not None]

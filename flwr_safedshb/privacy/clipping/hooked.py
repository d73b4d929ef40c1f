"""Clipped sums by Opacus' hooks, for every model that they cover."""

from __future__ import annotations

import torch
from torch import nn

from flwr_safedshb.privacy.clipping.checks import UnsupportedModelError
from flwr_safedshb.privacy.clipping.hooks import GhostModule, PerExampleModule
from flwr_safedshb.privacy.clipping.linear import clip_factors
from flwr_safedshb.privacy.clipping.parts import row_norms
from flwr_safedshb.privacy.plan import Clipping

Gradients = list[torch.Tensor | None]


class Hooked:
    """Per-example clipping with hooks on the layers.

    Parameters
    ----------
    module : nn.Module
        A copy of the model that may get hooks.
    clipping : {"per-example", "ghost"}

    Attributes
    ----------
    holds : bool
        Whether every example's gradient is in memory at once.
    """

    def __init__(self, module: nn.Module, clipping: Clipping) -> None:
        self.holds = clipping == "per-example"
        kind = PerExampleModule if self.holds else GhostModule
        self._hooked = kind(module, loss_reduction="sum")
        self._trained = [p for p in module.parameters() if p.requires_grad]

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Pass examples through the module."""
        self._forget()
        outputs: torch.Tensor = self._hooked(inputs)
        return outputs

    def clipped_sum(
        self, losses: torch.Tensor, clip_norm: float
    ) -> tuple[list[torch.Tensor] | None, torch.Tensor]:
        """Return the sums for the trained parameters, and each gradient's norm, (k,).

        No sums if the examples must pass again without those whose norm is not finite.

        Parameters
        ----------
        losses : Tensor of shape (k,)
            Of the examples that were just passed through the module.
        clip_norm : float
            C.
        """
        clipped = self._by_gradients if self.holds else self._by_norms
        sums, norms = clipped(losses, clip_norm)
        self._forget()
        if sums is None:
            return None, norms
        return [
            torch.zeros_like(p) if s is None else s.view_as(p)
            for p, s in zip(self._trained, sums, strict=True)
        ], norms

    def _by_gradients(
        self, losses: torch.Tensor, clip_norm: float
    ) -> tuple[Gradients, torch.Tensor]:
        gradients = self._found("grad_sample", losses)
        norms = _joined([row_norms(g) for g in gradients if g is not None])
        factors, kept = clip_factors(norms, clip_norm)
        if kept is not None:
            gradients = [None if g is None else g[kept] for g in gradients]
        return [
            None if g is None else factors.to(g.dtype) @ g.flatten(1) for g in gradients
        ], norms

    def _by_norms(
        self, losses: torch.Tensor, clip_norm: float
    ) -> tuple[Gradients | None, torch.Tensor]:
        found = self._found("_norm_sample", losses)
        norms = _joined([n for n in found if n is not None])
        factors, kept = clip_factors(norms, clip_norm)
        if kept is not None:
            return None, norms
        self._hooked.disable_hooks()
        weighted = (factors.to(losses.dtype) * losses).sum()
        sums = _gradient(weighted, self._trained)
        self._hooked.enable_hooks()
        return sums, norms

    def _found(self, name: str, losses: torch.Tensor) -> Gradients:
        """Let the hooks measure a backward pass; None where it does not reach."""
        keep_graph = not self.holds
        reached = _gradient(losses.sum(), self._trained, keep_graph)
        found: Gradients = [getattr(p, name) for p in self._trained]
        for gradient, measured in zip(reached, found, strict=True):
            if gradient is not None and measured is None:
                raise UnsupportedModelError(
                    "a parameter is used outside the layer that holds it, so its "
                    "per-example gradients are unknown; give it a module of its own"
                )
        return found

    def _forget(self) -> None:
        for p in self._trained:
            for measured in ("grad_sample", "_norm_sample"):
                setattr(p, measured, None)


def _gradient(
    value: torch.Tensor, parameters: list[nn.Parameter], keep_graph: bool = False
) -> Gradients:
    # Unlike backward(), this leaves nothing in `.grad`.
    return list(
        torch.autograd.grad(
            value, parameters, retain_graph=keep_graph, allow_unused=True
        )
    )


def _joined(norms: list[torch.Tensor]) -> torch.Tensor:
    """Norms of whole gradients from those of their parts, each of shape (k,)."""
    joined: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([n.double() for n in norms]), dim=0
    )
    return joined

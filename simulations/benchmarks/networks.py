"""Models of the step's benchmark that no simulation trains."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class _Block(nn.Module):
    """A layer of a transformer, (k, positions, width), made of what Opacus knows."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.taken, self.given = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = (
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        taken = self.taken(self.before(inputs))
        heads = taken.unflatten(2, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads)
        between = inputs + self.given(attended.transpose(1, 2).flatten(2))
        hidden = functional.gelu(self.wide(self.between(between)))
        outputs: torch.Tensor = between + self.narrow(hidden)
        return outputs


class Transformer(nn.Module):
    """Two layers on sequences of vectors, whose mean tells the class."""

    def __init__(self, width: int, heads: int, num_outputs: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(_Block(width, heads), _Block(width, heads))
        self.head = nn.Linear(width, num_outputs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits, (k, num_outputs), of (k, positions, width)."""
        outputs: torch.Tensor = self.head(self.blocks(inputs).mean(dim=1))
        return outputs

"""ResNet-18 with GroupNorm: BatchNorm would mix the examples of a batch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut, on images (k, channels, height, width)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(8, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(8, outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.append(nn.GroupNorm(8, outputs))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the block's outputs."""
        hidden = functional.relu(self.norm1(self.conv1(inputs)))
        hidden = self.norm2(self.conv2(hidden)) + self.shortcut(inputs)
        return functional.relu(hidden)


def resnet18(num_classes: int, width: int = 64) -> nn.Sequential:
    """Return ResNet-18 for images (k, 3, height, width).

    Parameters
    ----------
    num_classes : int
    width : int
        Channels of the first blocks, a multiple of 8; the next ones have 2, 4 and 8
        times as many.
    """
    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
        nn.GroupNorm(8, 64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
    )
    inputs = 64
    for level in range(4):
        outputs = width * 2**level
        model.append(ResidualBlock(inputs, outputs, 1 if level == 0 else 2))
        model.append(ResidualBlock(outputs, outputs, 1))
        inputs = outputs
    model.append(nn.AdaptiveAvgPool2d(1)).append(nn.Flatten())
    return model.append(nn.Linear(inputs, num_classes))

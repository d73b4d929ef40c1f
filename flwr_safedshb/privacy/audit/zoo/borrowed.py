"""Models of torchvision and Hugging Face, with random weights; nothing is downloaded.

They are there where these packages are installed; `missing` says which are not.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from flwr_safedshb.privacy.audit.subject import Subject, floats, tokens
from flwr_safedshb.privacy.audit.zoo.plain import cross_entropy

NEEDED = ("torchvision", "transformers", "peft")


def missing() -> list[str]:
    """Return the packages that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def import_torchvision() -> None:
    """Import torchvision, also one that was built for another torch.

    PyPI's torchvision is built for CUDA. Beside a torch for processors its compiled
    operators do not load, and it stops where it describes two of them. No model needs
    these; to declare them is enough.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{name}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )
        importlib.import_module("torchvision")


class _Logits(nn.Module):
    """A Hugging Face classifier whose output is its logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(input_ids=inputs).logits
        return outputs


def _resnet18() -> nn.Module:
    """Return ResNet-18 with an eighth of the channels in its blocks."""
    import_torchvision()
    resnet = importlib.import_module("torchvision.models.resnet")

    class Narrow(resnet.ResNet):  # type: ignore[misc, name-defined]
        def _make_layer(self, block: Any, planes: int, *rest: Any, **more: Any) -> Any:
            return super()._make_layer(block, planes // 8, *rest, **more)

    model: nn.Module = Narrow(
        resnet.BasicBlock,
        [2, 2, 2, 2],
        num_classes=3,
        norm_layer=lambda channels: nn.GroupNorm(8, channels),
    )
    model.fc = nn.Linear(64, 3)
    return model


def _bert() -> Any:
    import_torchvision()  # transformers imports it, and fails where it fails
    transformers = importlib.import_module("transformers")
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)


def _gpt2() -> Any:
    import_torchvision()
    transformers = importlib.import_module("transformers")
    config = transformers.GPT2Config(
        vocab_size=20,
        n_positions=8,
        n_embd=16,
        n_layer=1,
        n_head=2,
        num_labels=3,
        pad_token_id=0,
    )
    return transformers.GPT2ForSequenceClassification(config)


def _whole(make: Callable[[], Any]) -> Callable[[], nn.Module]:
    return lambda: _Logits(make())


def _adapted(make: Callable[[], Any], layers: list[str]) -> Callable[[], nn.Module]:
    def adapted() -> nn.Module:
        model = make()
        peft = importlib.import_module("peft")
        config = peft.LoraConfig(r=2, target_modules=layers, lora_dropout=0.0)
        return _Logits(peft.get_peft_model(model, config))

    return adapted


SUBJECTS = (
    Subject(
        "torchvision ResNet-18 with GroupNorm, an eighth as wide",
        _resnet18,
        cross_entropy,
        floats(3, 8, 8, classes=3),
        # In parts of a batch, as gradients of a wide one are held: the same layers, and
        # thousands of candidates in the time of a few.
        clipping="ghost",
        driven=False,
    ),
    Subject("BERT", _whole(_bert), cross_entropy, tokens(4, 20, 3)),
    Subject(
        "BERT with LoRA",
        _adapted(_bert, ["query", "value"]),
        cross_entropy,
        tokens(4, 20, 3),
    ),
    Subject("GPT-2", _whole(_gpt2), cross_entropy, tokens(4, 20, 3)),
    Subject(
        "GPT-2 with LoRA", _adapted(_gpt2, ["c_attn"]), cross_entropy, tokens(4, 20, 3)
    ),
)

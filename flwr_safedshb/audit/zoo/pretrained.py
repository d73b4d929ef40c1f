"""Models of Hugging Face, with random weights; nothing is downloaded.

They are there where these packages are installed; `missing` says which are not.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from flwr_safedshb.audit.target_model import Subject, tokens
from flwr_safedshb.audit.zoo.plain import cross_entropy

NEEDED = ("transformers", "peft")


def missing() -> list[str]:
    """Return the packages that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


class _Logits(nn.Module):
    """A Hugging Face classifier whose output is its logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(input_ids=inputs).logits
        return outputs


def _bert() -> Any:
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

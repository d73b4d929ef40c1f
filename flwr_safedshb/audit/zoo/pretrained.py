"""Models of Hugging Face, with random weights; nothing is downloaded.

They take part where the packages of `NEEDED` are installed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from torch import nn

from flwr_safedshb.audit.target_model import ComposedModel, TargetModel, tokens

NEEDED = ("transformers", "peft")


def missing_packages() -> list[str]:
    """Return the packages that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def _make_bert() -> Any:
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


def _make_gpt2() -> Any:
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


def _target(name: str, make: Callable[[], Any], *lora_layers: str) -> TargetModel:
    """Return a classifier whose outputs are its logits, with LoRA on some layers."""

    def make_classifier() -> nn.Module:
        inner = make()
        if lora_layers:
            peft = importlib.import_module("peft")
            config = peft.LoraConfig(
                r=2, target_modules=list(lora_layers), lora_dropout=0.0
            )
            inner = peft.get_peft_model(inner, config)
        return ComposedModel(lambda m, ids: m.inner(input_ids=ids).logits, inner=inner)

    return TargetModel(name, make_classifier, tokens(4, 20, 3))


MODELS = (
    _target("BERT", _make_bert),
    _target("BERT with LoRA", _make_bert, "query", "value"),
    _target("GPT-2", _make_gpt2),
    _target("GPT-2 with LoRA", _make_gpt2, "c_attn"),
)

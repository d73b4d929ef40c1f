"""Tiny models of Hugging Face, from configs; nothing is downloaded.

Tests that need them are skipped where these packages are not installed.
"""

import importlib
from typing import Any

import pytest

from flwr_safedshb.audit.zoo.pretrained import missing_packages

WORDS, LENGTH, CLASSES = 50, 8, 3


def bert(width: int = 16, layers: int = 1) -> Any:
    return _transformers().BertForSequenceClassification(
        _transformers().BertConfig(
            vocab_size=WORDS,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
            num_labels=CLASSES,
        )
    )


def gpt2() -> Any:
    return _transformers().GPT2LMHeadModel(
        _transformers().GPT2Config(
            vocab_size=WORDS,
            n_positions=16,
            n_embd=16,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def with_lora(model: Any) -> Any:
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(r=4, target_modules=["query", "value"])
    return peft.get_peft_model(model, config)


def _transformers() -> Any:
    if absent := missing_packages():
        pytest.skip(f"{', '.join(absent)} not installed")
    return importlib.import_module("transformers")

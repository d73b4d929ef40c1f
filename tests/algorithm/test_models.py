"""Models that people have: what `check_model` says yes to trains, as it is."""

from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message
from torch import nn
from torch.nn import functional

from flwr_safedshb import (
    InProcessGrid,
    PrivacyPlan,
    SafeDSHB,
    SafeDSHBClient,
    SeededRandomness,
    check_model,
    client_app,
    trained_arrays,
)
from flwr_safedshb.privacy.clipping.gradients import UnsupportedModelError
from tests import borrowed

SIZE = 12
PLAN = PrivacyPlan(1.0, 0.5, 4, SIZE)


def sentences() -> list[dict[str, Any]]:
    """Items as a tokenizer makes them: lists of numbers."""
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(borrowed.WORDS, (SIZE, borrowed.LENGTH), generator=draw)
    return [
        {"input_ids": w, "attention_mask": [1] * len(w), "labels": w[0] % 3}
        for w in words.tolist()
    ]


def next_word(outputs: Any, words: torch.Tensor) -> torch.Tensor:
    logits = outputs.logits[:, :-1].transpose(1, 2)
    return functional.cross_entropy(logits, words[:, 1:], reduction="none").mean(1)


class Counting(InProcessGrid):
    """A Grid that counts the bytes of the arrays it carries."""

    sent = 0
    received_bytes = 0

    def answer(self, messages: list[Message]) -> list[Message]:
        replies = super().answer(messages)
        self.sent = max([self.sent, *map(_bytes, messages)])
        self.received_bytes = max([self.received_bytes, *map(_bytes, replies)])
        return replies


def _bytes(message: Message) -> int:
    records = message.content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values())


def trained(model: Any, **settings: Any) -> tuple[Counting, ArrayRecord]:
    """Check a model, train it for two rounds, and return the Grid and what came."""
    check_model(model)

    def client_fn(context: Context) -> SafeDSHBClient:
        noise = SeededRandomness(0)
        return SafeDSHBClient(
            model, plan=PLAN, context=context, randomness=noise, **settings
        )

    grid = Counting(client_app(client_fn), 2)
    initial = trained_arrays(model)
    result = SafeDSHB(momentum=0.5).start(grid, initial, 2)
    assert result.train_metrics_clientapp[2]["replies"] == 2
    for name, array in result.arrays.items():
        assert (array.numpy() != initial[name].numpy()).any(), name
    return grid, result.arrays


@pytest.mark.federation
def test_a_whole_bert_trains_as_it_is() -> None:
    trained(
        borrowed.bert(),
        loss=nn.CrossEntropyLoss(),
        dataset=sentences(),
        target="labels",
    )


def test_a_whole_gpt2_trains_as_it_is() -> None:
    items = [{"input_ids": item["input_ids"]} for item in sentences()]
    trained(
        borrowed.gpt2(),
        loss=next_word,
        dataset=items,
        unpack=lambda item: (item, item["input_ids"]),
    )


@pytest.mark.federation
def test_lora_sends_little_more_than_its_own_weights() -> None:
    model = borrowed.with_lora(borrowed.bert(width=64, layers=2))
    grid, arrays = trained(
        model, loss=nn.CrossEntropyLoss(), dataset=sentences(), target="labels"
    )
    weights = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
    everything = sum(4 * p.numel() for p in model.parameters())
    assert all("lora" in name for name in arrays)
    assert weights < grid.sent == grid.received_bytes <= 1.3 * weights
    assert grid.sent < everything / 10


def test_batch_norm_is_refused_in_one_short_sentence_and_works_frozen() -> None:
    layers = [(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)) for _ in range(9)]
    model = nn.Sequential(*(layer for pair in layers for layer in pair))
    with pytest.raises(UnsupportedModelError) as raised:
        check_model(model)
    words = str(raised.value)
    assert words.count("BatchNorm2d") == 1
    assert "GroupNorm" in words
    assert len(words) < 250
    small = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    small.append(nn.Linear(16, 2))
    small[1].requires_grad_(False).eval()
    images = torch.randn(SIZE, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = (images.sum(dim=(1, 2, 3)) > 0).long()
    trained(small, loss=nn.CrossEntropyLoss(), dataset=(images, labels))


class Broken(nn.Linear):
    """Its layers are fine, and it cannot be trained."""

    @property
    def dummy_inputs(self) -> dict[str, torch.Tensor]:
        return {"input": torch.zeros(3, 4)}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) - super().forward(input).mean(0)


def test_check_model_says_yes_only_to_what_trains() -> None:
    with pytest.raises(UnsupportedModelError, match="mixes the examples"):
        check_model(Broken(4, 2))
    like = torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64)
    check_model(nn.Linear(3, 2), nn.CrossEntropyLoss(), like)
    with pytest.raises(UnsupportedModelError, match=r"inputs float32 \(k, 3\)"):
        check_model(nn.Linear(4, 2), nn.CrossEntropyLoss(), like)

"""A tiny BERT with LoRA, from a config; the data are made up: nothing is downloaded."""

from functools import cache

import torch
from flwr.app import Context
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, random_split
from transformers import BertConfig, BertForSequenceClassification

WORDS, LENGTH = 32, 8
LOSS = nn.CrossEntropyLoss()


@cache  # once for all messages: to look through it costs more than a step
def make_model() -> PeftModel:
    """Return the model; its frozen base must be the same everywhere."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    sizes |= {"vocab_size": WORDS, "num_hidden_layers": 1, "initializer_range": 0.3}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    with torch.random.fork_rng():
        torch.manual_seed(0)  # in place of weights from a hub
        base = BertForSequenceClassification(BertConfig(num_labels=2, **sizes))
        lora = LoraConfig(r=4, target_modules=["query", "value"], task_type="SEQ_CLS")
        return get_peft_model(base, lora)


def load_data(context: Context) -> tuple[DataLoader, DataLoader]:
    """Return a node's sentences, as tokenizers make them: dicts of numbers."""
    draw = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    labels = torch.randint(2, (400,), generator=draw)
    words = torch.randint(WORDS // 2, (400, LENGTH), generator=draw)
    words += labels.unsqueeze(1) * (WORDS // 2)
    names = ("input_ids", "token_type_ids", "labels")
    rows = zip(words, torch.zeros_like(words), labels, strict=True)
    items = [dict(zip(names, row, strict=True)) for row in rows]
    train, test = random_split(items, [0.75, 0.25], draw)
    return DataLoader(train, batch_size=50, shuffle=True), DataLoader(test, 50)


def train(model: nn.Module, loader: DataLoader, epochs: int, lr: float) -> None:
    """Train what is not frozen."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=lr, momentum=0.9)
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()


def test(model: nn.Module, loader: DataLoader) -> float:
    """Return the accuracy."""
    model.eval()
    correct = 0
    with torch.no_grad():
        for batch in loader:
            labels = batch.pop("labels")
            correct += int((model(**batch).logits.argmax(1) == labels).sum())
    return correct / len(loader.dataset)

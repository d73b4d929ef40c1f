"""The model and the collator of a Hugging Face Trainer; our step in place of its loop.

    python examples/frameworks/huggingface.py

Nothing is downloaded: the model comes from a config, and the sentences are made up.
"""

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification
from transformers import default_data_collator as collator

import flwr_safedshb as safe

NODES, WORDS, LENGTH = 5, 20, 6

# As for a Trainer(model=model, data_collator=collator, train_dataset=...).
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
sizes |= {"hidden_dropout_prob": 0.0, "initializer_range": 0.3}
torch.manual_seed(0)
model = BertForSequenceClassification(
    BertConfig(vocab_size=WORDS, num_hidden_layers=1, num_labels=2, **sizes)
)


def load_dataset(node):
    """Return a node's items: dicts, as tokenizers make them."""
    draw = torch.Generator().manual_seed(node)
    labels = torch.randint(2, (200,), generator=draw)
    words = torch.randint(WORDS // 2, (200, LENGTH), generator=draw)
    words += labels[:, None] * (WORDS // 2)
    pairs = zip(words.tolist(), labels.tolist(), strict=True)
    return [{"input_ids": ids, "label": label} for ids, label in pairs]


def make_client(context):
    """Hand model, collator and dataset to a private client."""
    items = load_dataset(int(context.node_config["partition-id"]))
    # All items at once: a collator that pads then pads all of them to one length.
    inputs = collator(items)
    data = inputs, inputs.pop("labels")
    privacy = safe.PrivacyPlan.calibrate(
        3.0, 1e-5, 20, clip_norm=1.0, batch_size=100, num_examples=len(items)
    )
    noise = None if "state-dir" in context.node_config else safe.SeededRandomness(0)
    loss = nn.CrossEntropyLoss()  # the one that the model computes from labels
    return safe.SafeDSHBClient(model, loss, data, privacy, context, randomness=noise)


def accuracy(arrays):
    """Return how good a model is on items of a node that took no part."""
    model.load_state_dict(arrays.to_torch_state_dict(), strict=False)
    inputs = collator(load_dataset(NODES))
    labels = inputs.pop("labels")
    with torch.no_grad():
        return float((model.eval()(**inputs).logits.argmax(1) == labels).float().mean())


def main():
    """Train in this process, and print what the model is worth."""
    model.classifier.requires_grad_(True)
    model.bert.requires_grad_(False)  # a head on a frozen base needs little noise
    strategy = safe.SafeDSHB(
        num_malicious_nodes=1, server_learning_rate=4.0, momentum=0.5
    )
    grid = safe.InProcessGrid(safe.client_app(make_client), NODES)
    result = strategy.start(grid, safe.trained_arrays(model), 20)
    print(f"accuracy {accuracy(result.arrays):.2f}")


if __name__ == "__main__":
    main()

"""A Hugging Face model with LoRA, trained by FedAvg: the clients."""

import torch
from flwr.app import Context
from task import LOSS, load_data, make_model

from flwr_safedshb import PrivacyPlan, SafeDSHBClient, SeededRandomness, client_app


def client_fn(context: Context) -> SafeDSHBClient:
    """Train the adapters on local data."""
    data = load_data(context)[0].dataset
    plan = PrivacyPlan(1.0, 0.5, batch_size=50, num_examples=len(data))
    noise = None if "state-dir" in context.node_config else SeededRandomness(0)
    more = {"target": "labels", "randomness": noise, "delta": 1e-4}
    words = torch.zeros(8, dtype=torch.int64)  # what an example looks like
    more["like"] = {"input_ids": words, "token_type_ids": words}, 0
    return SafeDSHBClient(make_model(), LOSS, data, plan, context, **more)


app = client_app(client_fn)

"""A Hugging Face model with LoRA, trained by FedAvg: the clients."""

from flwr.app import Context
from task import LOSS, load_data, make_model

import flwr_safedshb as safe


def client_fn(context: Context) -> safe.SafeDSHBClient:
    """Train the adapters on local data, and evaluate them on some that do not train."""
    train, test = (loader.dataset for loader in load_data(context))
    privacy = safe.PrivacyTarget(3.0, 1e-5, steps=40, batch_size=50, evaluations=2)
    noise = None if "state-dir" in context.node_config else safe.SeededRandomness(0)
    more = {"target": "labels", "randomness": noise}
    more["like"] = {"input_ids": [0] * 8, "token_type_ids": [0] * 8}, 0  # an example
    more["evaluation"] = safe.PrivateEvaluation(5.0, held_out=len(test))
    model, data = make_model(), train + test
    return safe.SafeDSHBClient(model, LOSS, data, privacy, context, **more)


app = safe.client_app(client_fn)

"""A Hugging Face model with LoRA, trained by FedAvg: the clients."""

from flwr.app import Context
from task import LOSS, load_data, make_model

from flwr_safedshb import PrivacyPlan, SafeDSHBClient, SeededRandomness, client_app


def client_fn(context: Context) -> SafeDSHBClient:
    """Train the adapters on local data."""
    data = load_data(context)[0].dataset
    plan = PrivacyPlan(1.0, 0.5, batch_size=50, num_examples=len(data))
    noise = None if "state-dir" in context.node_config else SeededRandomness(0)
    more = {"target": "labels", "randomness": noise, "delta": 1e-4}
    return SafeDSHBClient(make_model(), LOSS, data, plan, context, **more)


app = client_app(client_fn)

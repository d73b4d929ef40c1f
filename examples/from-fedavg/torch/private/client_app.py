"""An app with the structure of Flower's PyTorch quickstart: the clients."""

from flwr.app import Context, Message, MetricRecord, RecordDict
from task import Net, load_data
from task import test as test_fn
from torch.nn import CrossEntropyLoss

from flwr_safedshb import PrivacyPlan, SafeDSHBClient, SeededRandomness, client_app


def client_fn(context: Context) -> SafeDSHBClient:
    """Train the model on local data."""
    data = load_data(context)[0].dataset
    plan = PrivacyPlan(1.0, 1.0, batch_size=32, num_examples=len(data))
    noise = None if "state-dir" in context.node_config else SeededRandomness(0)
    more = {"target": "label", "randomness": noise, "delta": 1e-4}
    return SafeDSHBClient(Net(), CrossEntropyLoss(), data, plan, context, **more)


app = client_app(client_fn)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the model on local data."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, loader = load_data(context)
    loss, accuracy = test_fn(model, loader)
    metrics = {
        "eval_loss": loss,
        "eval_acc": accuracy,
        "num-examples": len(loader.dataset),
    }
    content = RecordDict({"metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)

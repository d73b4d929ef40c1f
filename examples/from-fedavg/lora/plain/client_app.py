"""A Hugging Face model with LoRA, trained by FedAvg: the clients."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from task import load_data, make_model, train

app = ClientApp()


@app.train()
def fit(msg: Message, context: Context) -> Message:
    """Train the adapters on local data."""
    model = make_model()
    sent = msg.content["arrays"].to_torch_state_dict()
    model.load_state_dict(sent, strict=False)
    loader, _ = load_data(context)
    train(model, loader, epochs=1, lr=0.2)
    trained = {name: model.state_dict()[name] for name in sent}
    metrics = MetricRecord({"num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(trained), "metrics": metrics})
    return Message(content=content, reply_to=msg)

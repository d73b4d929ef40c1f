"""An app of the older kind: the server's parts come from a server_fn."""

from flwr.common import Context, ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.serverapp import ServerApp
from task import Net, get_weights, load_data, set_weights, test

from flwr_safedshb import ClassicStrategy, SafeDSHB


def evaluate(server_round: int, weights: list, config: dict) -> tuple[float, dict]:
    """Evaluate the model on data that the server has made up."""
    net = Net()
    set_weights(net, weights)
    public = Context(0, 0, {"partition-id": 1000}, None, {})
    loss, accuracy = test(net, load_data(public)[1])
    return loss, {"accuracy": accuracy}


def server_fn(context: Context) -> ServerAppComponents:
    """Make the parts of the server."""
    rounds = int(context.run_config["num-server-rounds"])
    initial = ndarrays_to_parameters(get_weights(Net()))
    safe = SafeDSHB(num_malicious_nodes=1, momentum=0.8, evaluate_every=30)
    strategy = ClassicStrategy(safe, initial, evaluate_fn=evaluate)
    config = ServerConfig(num_rounds=rounds)
    return ServerAppComponents(strategy=strategy, config=config)


app = ServerApp(server_fn=server_fn)

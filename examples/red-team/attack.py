"""Which strategies survive three colluding nodes of ten? ``python attack.py``."""

from app import NODES, accuracy, initial, ordinary, private
from flwr.serverapp.strategy import FedAvg, FedMedian, Krum

from flwr_safedshb import AdversarialGrid, InProcessGrid, SafeDSHB, aggregation, attacks

TRAIN = {"fraction_evaluate": 0.0}
SMEA = aggregation.SMEA()
STRATEGIES = {  # with the client that each one needs, and the rule adversaries expect
    FedAvg(**TRAIN): (ordinary, aggregation.Average()),
    FedMedian(**TRAIN): (ordinary, aggregation.Median()),
    Krum(num_malicious_nodes=3, **TRAIN): (ordinary, aggregation.Krum()),
    SafeDSHB(SMEA, 3, server_learning_rate=4.0, momentum=0.9): (private, SMEA),
}
for strategy, (app, rule) in STRATEGIES.items():
    for attack in (None, "ALIE", "FOE", "FarCluster", "NonFinite"):
        grid = InProcessGrid(app, NODES)
        if attack is not None:
            grid = AdversarialGrid(grid, getattr(attacks, attack)(), 3, rule)
        result = strategy.start(grid, initial(), num_rounds=25)
        name = type(strategy).__name__
        print(f"{name:10} {attack or 'nobody':10} {accuracy(result.arrays):.2f}")

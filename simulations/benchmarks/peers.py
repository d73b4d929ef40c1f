"""Other ways to SMEA's answer and what a call costs, and ByzFL's own training loop.

Each peer looks at every subset, so a call may take years. `measure_price` then times
the peer's own code on a sample of the subsets and multiplies by their number.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec, module_from_spec
from itertools import combinations, count, islice
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from simulations.benchmarks.families import Vectors
from simulations.benchmarks.measure import thread_seconds
from simulations.experiment import make_share

Subset = tuple[int, ...]
# Vectors, f, and the subsets to look at instead of all; returns the mean, (d,).
Peer = Callable[[Vectors, int, list[Subset] | None], NDArray[np.floating]]

BRUTE_FORCE, BYZFL, BYZPY = "brute force", "ByzFL", "ByzPy"
PEERS = (BRUTE_FORCE, BYZFL, BYZPY)
# Subsets whose eigenvalues brute force asks for at once.
BATCH = 2048
# From so many coordinates on ByzFL is faster on torch tensors than on numpy arrays.
TENSOR_COORDINATES = 1000
# A sample has so many subsets, between the bounds as the seconds allow.
SAMPLE, SAMPLE_SECONDS = (16, 400), 0.15


@dataclass(frozen=True)
class Price:
    """What one call costs."""

    seconds: float
    extrapolated: bool  # from a sample of the subsets
    # Whether it answered with the mean of the best subset; None where only sampled.
    found: bool | None


def measure_price(
    peer: Peer,
    vectors: Vectors,
    f: int,
    best: Subset,
    limit: float,
    rng: np.random.Generator,
) -> Price:
    """Time one call, or a sample of its work if it would take more than `limit`.

    The best subset is the first of the sample: a peer that does more work whenever it
    finds a better one then does it once, about as often as in a whole call.

    Parameters
    ----------
    peer : Peer
    vectors : (n, d) array
    f : int
    best : tuple of int
        The subset of size n - f with the smallest top eigenvalue.
    limit : float
        Seconds.
    rng : Generator
        For the sample.
    """
    n, total = len(vectors), math.comb(len(vectors), f)
    least, most = (min(total, size) for size in SAMPLE)
    sample = [best]
    while len(sample) < most:
        sample.append(tuple(np.sort(rng.permutation(n)[: n - f]).tolist()))

    def seconds_of(size: int) -> float:
        return thread_seconds(lambda: peer(vectors, f, sample[:size]))[0]

    seconds_of(1)  # loads what a library loads late
    # A moment of the machine may slow one of these down, and not all.
    once = min(seconds_of(1) for _ in range(3))
    size = min(most, max(least, int(SAMPLE_SECONDS / seconds_of(least) * least)))
    seconds = seconds_of(size)
    # Whole calls only where they are short even if no part of the sample's time was
    # spent on more than its subsets: another moment must not make hours of them.
    if seconds / size * total > limit:
        more = seconds - once if seconds > once else seconds
        estimate = once + more / (size - 1) * (total - 1)
        return Price(estimate, extrapolated=True, found=None)
    seconds, answer = thread_seconds(lambda: peer(vectors, f, None))
    return Price(seconds, extrapolated=False, found=is_mean(answer, vectors, best))


def is_mean(answer: NDArray[np.floating], vectors: Vectors, subset: Subset) -> bool:
    """Return whether an answer, (d,), is the mean of a subset, up to float32.

    Another subset moves the mean by more than a hundredth of the spread; equal vectors
    make subsets with the same mean, and any of them will do.
    """
    mean = vectors[list(subset)].mean(axis=0, dtype=np.float64)
    return bool(np.abs(answer - mean).max() <= 1e-4 * np.abs(vectors).max())


def brute_force(
    vectors: Vectors, f: int, subsets: list[Subset] | None = None
) -> NDArray[np.floating]:
    """Average the best subset by the eigenvalues of all of them, from Gram matrices."""
    wide = vectors.astype(np.float64)
    gram = wide @ wide.T
    n = len(vectors)
    least, best = math.inf, np.arange(n - f)
    remaining = iter(combinations(range(n), n - f) if subsets is None else subsets)
    while batch := list(islice(remaining, BATCH)):
        members = np.array(batch)
        block = gram[members[:, :, None], members[:, None, :]]
        rows, columns = block.mean(-1, keepdims=True), block.mean(-2, keepdims=True)
        centred = block - rows - columns + rows.mean(-2, keepdims=True)
        values = np.linalg.eigvalsh(centred)[:, -1]
        if values.min() < least:
            least, best = float(values.min()), members[values.argmin()]
    mean: NDArray[np.floating] = wide[best].mean(axis=0)
    return mean


def load_peers() -> dict[str, Peer]:
    """Return what is installed, by name; brute force is always there."""
    found: dict[str, Peer] = {BRUTE_FORCE: brute_force}
    for name, load in ((BYZFL, _load_byzfl), (BYZPY, _load_byzpy)):
        if find_spec(name.lower()) is not None:
            torch.set_num_threads(1)
            found[name] = load()
    return found


def _load_byzfl() -> Peer:
    """Return ByzFL's SMEA: one step of a power iteration for each subset."""
    _import_without_init("byzfl")
    module = importlib.import_module("byzfl.aggregators.aggregators")
    seeds = count()

    def byzfl(
        vectors: Vectors, f: int, subsets: list[Subset] | None
    ) -> NDArray[np.floating]:
        tensors = vectors.shape[1] >= TENSOR_COORDINATES
        given = torch.from_numpy(vectors) if tensors else vectors
        if subsets is None:
            # It draws from the global generators: its answers should be repeatable.
            seed = next(seeds)
            np.random.seed(seed)  # noqa: NPY002
            torch.manual_seed(seed)
            return np.asarray(module.SMEA(f)(given))
        with patch.object(module, "itertools", _sampled_combinations(subsets)):
            return np.asarray(module.SMEA(f)(given))

    return byzfl


def _load_byzpy() -> Peer:
    """Return ByzPy's SMEA: an eigenvalue problem on the Gram matrix for each subset."""
    module = importlib.import_module("byzpy.aggregators.geometric_wise.smea")

    def byzpy(
        vectors: Vectors, f: int, subsets: list[Subset] | None
    ) -> NDArray[np.floating]:
        given = list(torch.from_numpy(vectors))
        if subsets is None:
            return np.asarray(module.SMEA(f).aggregate(given))
        sampled = _sampled_combinations(subsets).combinations
        with patch.object(module, "combinations", sampled):
            return np.asarray(module.SMEA(f).aggregate(given))

    return byzpy


def _sampled_combinations(subsets: Iterable[Subset]) -> SimpleNamespace:
    """Stand in for itertools with a sample for all combinations."""
    return SimpleNamespace(combinations=lambda *_: iter(subsets))


def _import_without_init(*packages: str) -> None:
    """Import packages without their __init__, which wants data sets and plots."""
    for name in packages:
        if name not in sys.modules:
            spec = find_spec(name)
            assert spec is not None
            sys.modules[name] = module_from_spec(spec)


# ---- ByzFL's training loop, as its own benchmark calls it ---------------------------


class ByzFLModel(nn.Module):
    """The paper's model, with one logit for each example: (k, 68) to (k,)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(68, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.linear(inputs)
        return logits.squeeze(1)


def byzfl_round(overrides: str, honest: int, f: int) -> Callable[[], None]:
    """Return a function that does one round of ByzFL; without privacy, which it lacks.

    Parameters
    ----------
    overrides : str
        Of the experiment whose data are used.
    honest, f : int
        Honest clients, and adversaries beside them.
    """
    framework = _import_framework()
    common = {
        "model_name": "LogisticRegression",
        "device": "cpu",
        "loss_name": "BCEWithLogitsLoss",
        "nb_labels": 2,
    }
    private: dict[str, object] = {"LabelFlipping": False, "momentum": 0.99}
    clients = [
        framework["client"].Client(
            common
            | private
            | {
                "training_dataloader": _byzfl_batches(overrides, i),
                "store_per_client_metrics": False,
            }
        )
        for i in range(honest)
    ]
    rule = {"name": "SMEA", "parameters": {"f": f}}
    aggregation = {"aggregator_info": rule, "pre_agg_list": []}
    server = framework["server"].Server(
        common
        | aggregation
        | {
            "optimizer_name": "SGD",
            "learning_rate": 1.0,
            "weight_decay": 1e-4,
            "milestones": [],
            "learning_rate_decay": 1.0,
            "test_loader": _byzfl_batches(overrides, 0),
        }
    )
    attack = framework["byzantine_client"].ByzantineClient(
        {
            "name": "Optimal_ALittleIsEnough",
            "f": f,
            "parameters": {"f": f, **aggregation},
        }
    )

    def play_round() -> None:
        for client in clients:
            client.compute_gradients()
        sent = [client.get_flat_gradients_with_momentum() for client in clients]
        server.update_model_with_gradients(sent + attack.apply_attack(sent))
        model = server.get_dict_parameters()
        for client in clients:
            client.set_model_state(model)

    return play_round


def _byzfl_batches(overrides: str, index: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    inputs, labels = make_share(overrides, index).examples
    return DataLoader(TensorDataset(inputs, labels.squeeze(1)), 25, shuffle=True)


def _import_framework() -> dict[str, Any]:
    """Import the parts of ByzFL's framework, and give it the paper's model."""
    root = "byzfl.fed_framework"
    _import_without_init("byzfl", root)
    package: Any = sys.modules[root]
    interface = importlib.import_module(f"{root}.model_base_interface")
    package.ModelBaseInterface = interface.ModelBaseInterface
    aggregator = importlib.import_module(f"{root}.robust_aggregator")
    package.RobustAggregator = aggregator.RobustAggregator
    models: Any = importlib.import_module(f"{root}.models")
    models.LogisticRegression = ByzFLModel
    names = ("client", "server", "byzantine_client")
    return {name: importlib.import_module(f"{root}.{name}") for name in names}

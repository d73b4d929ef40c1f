"""A node for the audit to talk to, with a ledger in a folder that is thrown away."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict, UserConfig
from torch import nn
from torch.utils.data import Dataset

from flwr_safedshb.algorithm.budget import LEDGER_NAME
from flwr_safedshb.algorithm.refusal import RefusedError
from flwr_safedshb.algorithm.wire import MOMENTUM_TAG
from flwr_safedshb.client import PrivateClientApp, SafeDSHBClient
from flwr_safedshb.flower.compat import set_process_run
from flwr_safedshb.privacy.ledger import database
from flwr_safedshb.privacy.ledger.ledger import Ledger
from flwr_safedshb.privacy.plan import PrivacyPlan

MakeClient = type[SafeDSHBClient]
FEATURES, CLASSES, EXAMPLES = 3, 2, 8
# Of eight examples four at a time: any one of them is in every other batch.
PLAN = PrivacyPlan(1.0, 20.0, 4, EXAMPLES)
# What a good message asks.
ASKED: Mapping[str, object] = {"step": 0, "momentum": 0.5, "session": "audit"}


class Node:
    """One node, which makes its client anew for every message, as Flower does.

    Parameters
    ----------
    dataset : Dataset of (input, target)
        `EXAMPLES` of them.
    folder : Path
        For its ledger.
    make_client : type
        `SafeDSHBClient`, or what tests put in its place.
    """

    def __init__(
        self,
        dataset: Dataset[object],
        folder: Path,
        make_client: MakeClient = SafeDSHBClient,
    ) -> None:
        config: UserConfig = {"state-dir": str(folder), "max-epsilon": 50.0}
        config["delta"] = 1e-5
        self._path = folder / LEDGER_NAME
        self._context = Context(7, 11, config, RecordDict(), {})
        self._model = nn.Linear(FEATURES, CLASSES)
        loss = nn.CrossEntropyLoss(reduction="none")

        def client_fn(context: Context) -> SafeDSHBClient:
            like = torch.zeros(FEATURES), 0
            return make_client(self._model, loss, dataset, PLAN, context, like=like)

        self._app = PrivateClientApp(client_fn)

    @property
    def arrays(self) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
        """Weights that fit the model."""
        return [
            np.full((CLASSES, FEATURES), 0.25, np.float32),
            np.zeros(CLASSES, np.float32),
        ]

    def charged(self) -> int:
        """Return how many steps the ledger has been charged for."""
        if not self._path.exists():
            return 0
        return sum(charge.steps for charge in Ledger(self._path).charges())

    def fit(self, arrays: object, config: object) -> str:
        """Take a step as a NumPyClient would be asked to, and name the answer."""
        try:
            client = self._app.make_client(self._context)
            momentum, count, metrics = client.fit(arrays, config)  # type: ignore[arg-type]
        except Exception as error:
            return named(error)
        return described(momentum, {"num-examples": count, **metrics})

    def train(self, content: RecordDict) -> str:
        """Send a message, and name the answer."""
        set_process_run(self._context.run_id)
        message = Message(content, dst_node_id=11, message_type="train")
        try:
            reply = self._app(message, self._context)
        except Exception as error:
            return named(error)
        records = reply.content
        arrays = next(iter(records.array_records.values())).to_numpy_ndarrays()
        metrics = {k: v for r in records.metric_records.values() for k, v in r.items()}
        return described(arrays, metrics)

    def step(self, number: int) -> str:
        """Send a good message, and name the answer."""
        return self.train(
            RecordDict(
                {
                    "arrays": ArrayRecord(self.arrays),
                    "config": ConfigRecord({**ASKED, "step": number}),  # type: ignore[dict-item]
                }
            )
        )


def described(arrays: Sequence[object], metrics: Mapping[str, object]) -> str:
    """Return all of an answer but its values, which alone may depend on the data.

    The number by which an answer is told from others is drawn anew for each.
    """
    words = []
    for array in arrays:
        assert isinstance(array, np.ndarray)
        finite = "finite" if np.isfinite(array).all() else "NOT FINITE"
        words.append(f"{array.dtype}{array.shape} {finite}")
    said = {name: value for name, value in metrics.items() if name != MOMENTUM_TAG}
    return f"answered: {', '.join(words)}; {said}"


def named(error: Exception) -> str:
    """Return what a server sees of an error."""
    if isinstance(error, RefusedError):
        return f"refused: {error}"
    return f"{type(error).__name__}: {error}"


def good_examples(seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return examples of no particular kind."""
    rng = np.random.default_rng(seed)
    inputs = torch.from_numpy(rng.standard_normal((EXAMPLES, FEATURES))).float()
    targets = torch.from_numpy(rng.integers(CLASSES, size=EXAMPLES))
    return list(zip(inputs, targets, strict=True))


@contextmanager
def quiet_folder() -> Iterator[Path]:
    """Make a folder for ledgers, and say nothing of what happens in it."""
    loggers = [logging.getLogger(name) for name in ("flwr", database.__name__)]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with tempfile.TemporaryDirectory(prefix="safedshb-") as folder:
            yield Path(folder)
    finally:
        for logger, was in zip(loggers, before, strict=True):
            logger.disabled = was

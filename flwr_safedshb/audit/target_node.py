"""A node for the audit to talk to, with a ledger in a temporary folder."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict, UserConfig
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import Dataset

from flwr_safedshb.algorithm.budget import LEDGER_NAME
from flwr_safedshb.algorithm.refusal import RefusedError
from flwr_safedshb.algorithm.wire import MOMENTUM_TAG
from flwr_safedshb.app import PrivateClientApp
from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.flower.compat import set_process_run
from flwr_safedshb.privacy.ledger import database, ledger
from flwr_safedshb.privacy.ledger.ledger import Ledger
from flwr_safedshb.privacy.plan import PrivacyPlan

MakeClient = type[SafeDSHBClient]
Pair = tuple[torch.Tensor, torch.Tensor]
FEATURES, CLASSES, EXAMPLES = 3, 2, 8
# Of eight examples four at a time: any one of them is in every other batch.
PLAN = PrivacyPlan(1.0, 20.0, 4, EXAMPLES)
GOOD_CONFIG: Mapping[str, object] = {"step": 0, "momentum": 0.5, "session": "audit"}


class AuditDataset(Dataset[object]):
    """`EXAMPLES` random examples, one of which may be bad in any way.

    Parameters
    ----------
    seed : int
    spoil : callable (example) -> anything, optional
        Makes the bad one from a good one, whenever it is read; it may raise.
    """

    def __init__(
        self, seed: int = 0, spoil: Callable[[Pair], object] | None = None
    ) -> None:
        rng = np.random.default_rng(seed)
        inputs = torch.from_numpy(rng.standard_normal((EXAMPLES, FEATURES))).float()
        targets = torch.from_numpy(rng.integers(CLASSES, size=EXAMPLES))
        self._good = list(zip(inputs, targets, strict=True))
        self._spoil = spoil

    def __len__(self) -> int:
        return len(self._good)

    def __getitem__(self, index: int) -> object:
        if index == 0 and self._spoil is not None:
            return self._spoil(self._good[0])
        return self._good[index]


class TargetNode:
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
        self._sent: set[bytes] = set()
        # Whether the last answer's arrays went out before, to the byte.
        self.is_repeated = False
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
        weights = np.full((CLASSES, FEATURES), 0.25, np.float32)
        return [weights, np.zeros(CLASSES, np.float32)]

    def count_charges(self) -> int:
        """Return how many steps the ledger has been charged for."""
        if not self._path.exists():
            return 0
        return sum(charge.steps for charge in Ledger(self._path).charges())

    def fit(self, arrays: object, config: object) -> str:
        """Ask for a step as of a NumPyClient, and describe the answer."""
        try:
            client = self._app.make_client(self._context)
            momentum, count, metrics = client.fit(arrays, config)  # type: ignore[arg-type]
        except Exception as error:
            return describe_error(error)
        self._remember(momentum)
        return describe_answer(momentum, {"num-examples": count, **metrics})

    def train(self, content: RecordDict) -> str:
        """Send a message, and describe the answer."""
        set_process_run(self._context.run_id)
        message = Message(content, dst_node_id=11, message_type="train")
        try:
            records = self._app(message, self._context).content
        except Exception as error:
            return describe_error(error)
        arrays = next(iter(records.array_records.values())).to_numpy_ndarrays()
        metrics = {k: v for r in records.metric_records.values() for k, v in r.items()}
        self._remember(arrays)
        return describe_answer(arrays, metrics)

    def _remember(self, arrays: Sequence[NDArray[np.generic]]) -> None:
        """Note what an answer holds, and whether it is an earlier one again."""
        content = b"".join(array.tobytes() for array in arrays)
        self.is_repeated = content in self._sent
        self._sent.add(content)

    def step(self, number: int) -> str:
        """Send a good message, and describe the answer."""
        config = ConfigRecord({**GOOD_CONFIG, "step": number})  # type: ignore[dict-item]
        return self.train(
            RecordDict({"arrays": ArrayRecord(self.arrays), "config": config})
        )


def describe_answer(arrays: Sequence[object], metrics: Mapping[str, object]) -> str:
    """Return all of an answer but its values, which alone may depend on the data.

    The momentum's tag is left out: it is drawn anew for each answer.
    """
    words = []
    for array in arrays:
        assert isinstance(array, np.ndarray)
        finite = "finite" if np.isfinite(array).all() else "NOT FINITE"
        words.append(f"{array.dtype}{array.shape} {finite}")
    shown = {name: value for name, value in metrics.items() if name != MOMENTUM_TAG}
    return f"answered: {', '.join(words)}; {shown}"


def describe_error(error: Exception) -> str:
    """Return what a server sees of an error."""
    if isinstance(error, RefusedError):
        return f"refused: {error}"
    return f"{type(error).__name__}: {error}"


@contextmanager
def temporary_ledgers() -> Iterator[Path]:
    """Make a temporary folder for ledgers, and log nothing of what happens in it."""
    names = "flwr", database.__name__, ledger.__name__
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with tempfile.TemporaryDirectory(prefix="safedshb-") as folder:
            yield Path(folder)
    finally:
        for logger, was in zip(loggers, before, strict=True):
            logger.disabled = was

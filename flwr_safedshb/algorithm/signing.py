"""Sign a step with the node's key."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from logging import ERROR
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
    load_ssh_private_key,
)
from flwr.app import UserConfigValue
from flwr.common import log

from flwr_safedshb.algorithm.budget import LedgerBudget, PrivacyBudget
from flwr_safedshb.algorithm.receipts import SignedReceipt, StepFacts, hash_arrays
from flwr_safedshb.algorithm.refusal import RefusedError
from flwr_safedshb.algorithm.requests import TrainRequest
from flwr_safedshb.algorithm.wire import Arrays

# Beside the ledger, where the config names no other.
KEY_NAME = "receipts.key"


class StepSigner:
    """Signs the steps of one node, if the server asks for that.

    Parameters
    ----------
    node : int
    config : mapping
        The node's. Its ``receipt-key`` names the file of a private key; `safedshb node`
        writes there the one that the SuperLink knows the node by. Without it, a key is
        made beside the ledger.
    budget : PrivacyBudget

    Raises
    ------
    RefusedError
        If the node has nothing to sign with, before anything is charged.
    """

    def __init__(
        self, node: int, config: Mapping[str, UserConfigValue], budget: PrivacyBudget
    ) -> None:
        if not isinstance(budget, LedgerBudget):
            raise RefusedError(
                "the run asks for receipts, and this node keeps no ledger that it "
                "could sign charges of: set state-dir in its config, or receipts=None "
                "in the strategy"
            )
        self._node, self._ledger = node, budget.ledger
        folder = self._ledger.path.parent
        named = config.get("receipt-key")
        try:
            own = _make_key(folder / KEY_NAME) if named is None else Path(str(named))
            self._key = load_key(own)
        except (OSError, ValueError) as error:
            log(ERROR, "The key for receipts cannot be read: %s", error)
            raise RefusedError(
                "the run asks for receipts, and this node's key cannot be read; the "
                "log of this node says why"
            ) from None

    def sign(
        self, request: TrainRequest, weights: Arrays, momentum: Arrays
    ) -> dict[str, bytes]:
        """Return the receipt of a step that was charged, as entries of the metrics."""
        facts = StepFacts(
            self._node,
            request.session,
            request.step,
            request.local_steps,
            hash_arrays(weights),
            hash_arrays(momentum),
        )
        charge = self._ledger.prove_charge(request.session)
        return {**SignedReceipt.sign(facts, charge, self._key).to_entries()}


@lru_cache(maxsize=128)
def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key in a file of OpenSSH or PEM.

    Raises
    ------
    OSError, ValueError
    """
    content = path.read_bytes()
    ssh = b"OPENSSH PRIVATE KEY" in content[:100]
    load = load_ssh_private_key if ssh else load_pem_private_key
    key = load(content, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{path} has no key on an elliptic curve of NIST")
    return key


def _make_key(path: Path) -> Path:
    """Make a key that only its owner can read, if there is none; return its path."""
    if not path.exists():
        key = ec.generate_private_key(ec.SECP384R1())
        form = Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        with tempfile.NamedTemporaryFile(dir=path.parent) as file:  # for its owner
            file.write(key.private_bytes(*form))
            file.flush()
            os.fsync(file.fileno())
            with suppress(FileExistsError):
                os.link(file.name, path)  # atomic, and replaces nothing
    return path

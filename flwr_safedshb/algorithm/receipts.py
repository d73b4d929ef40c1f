"""Receipts: what a node signs about its step, so that others can check a run later.

Formal guarantee
----------------
A receipt tells the server nothing about the data that the reply does not. Besides names
and numbers that the server sent, it has hashes of the model that came and of the
momentum that goes (functions of what the server has anyway), and a `ChargeProof`: an
entry of the ledger, made before any data was read, its hash, and an epsilon that is
computed from plans and steps. So it is post-processing of messages and of numbers that
depend on no example. It does tell how many entries the node's ledger has, and its
limits, which a policy makes public or not, but which are no data.

What a receipt proves: the holder of a key has signed this momentum for this model and
this step, and stands by this charge. That the noise was drawn as the plan says, nobody
else can see.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from numpy.typing import NDArray

from flwr_safedshb.algorithm.wire import RECEIPT_KEYS
from flwr_safedshb.privacy.ledger.proof import ChargeProof

FORMAT = "safedshb receipt 1"
# Also keeps a receipt's signature from being taken for one that Flower asks for.
_ALGORITHM = ec.ECDSA(hashes.SHA384())
# The most bytes of a receipt; one with ten plans has fewer.
MAX_BYTES = 2**14


@dataclass(frozen=True)
class StepFacts:
    """What a receipt is about, as its node and its server both know it.

    Attributes
    ----------
    node : int
    session : str
    step, local_steps : int
    model, momentum : str
        `hash_arrays` of theta_t and of the reply.
    """

    node: int
    session: str
    step: int
    local_steps: int
    model: str
    momentum: str


@dataclass(frozen=True)
class SignedReceipt:
    """A receipt as it is sent: its bytes, the signature, and the public key.

    Attributes
    ----------
    text : bytes
        JSON.
    signature : bytes
        ECDSA with SHA-384, in DER.
    key : bytes
        A point on P-256, P-384 or P-521, compressed.
    """

    text: bytes
    signature: bytes
    key: bytes

    @classmethod
    def sign(
        cls, facts: StepFacts, charge: ChargeProof, key: ec.EllipticCurvePrivateKey
    ) -> SignedReceipt:
        """Sign what was done, and what it was charged."""
        content = {"format": FORMAT, **vars(facts), "charge": charge.to_dict()}
        text = json.dumps(content, allow_nan=False).encode()
        return cls(text, key.sign(text, _ALGORITHM), encode_key(key.public_key()))

    @classmethod
    def from_records(
        cls, records: Iterable[Mapping[str, object]]
    ) -> SignedReceipt | None:
        """Return the receipt in a reply, or None; nothing of it is checked."""
        for record in records:
            values = tuple(record.get(name) for name in RECEIPT_KEYS)
            if all(isinstance(v, bytes) and len(v) <= MAX_BYTES for v in values):
                return cls(*cast(tuple[bytes, bytes, bytes], values))
        return None

    def to_entries(self) -> dict[str, bytes]:
        """Return the receipt as entries of a reply's metrics."""
        return dict(zip(RECEIPT_KEYS, vars(self).values(), strict=True))

    def to_dict(self) -> dict[str, str]:
        """Return the receipt as JSON values."""
        return {
            "text": self.text.decode(),
            "signature": self.signature.hex(),
            "key": self.key.hex(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, str]) -> SignedReceipt:
        """Return the receipt that `to_dict` described."""
        signature, key = (bytes.fromhex(values[name]) for name in ("signature", "key"))
        return cls(values["text"].encode(), signature, key)

    def parse(self) -> tuple[StepFacts, ChargeProof]:
        """Return what was signed.

        Raises
        ------
        ValueError
            If the signature is wrong, or the text is no receipt.
        """
        try:
            key = decode_key(self.key)
            key.verify(self.signature, self.text, _ALGORITHM)
        except (InvalidSignature, UnsupportedAlgorithm):
            raise ValueError("the signature is wrong") from None
        try:
            content = json.loads(self.text)
            if content.pop("format") != FORMAT:
                raise ValueError("another format")
            charge = ChargeProof.from_dict(content.pop("charge"))
            return StepFacts(**content), charge
        except (LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"the text is no receipt: {error}") from None


@dataclass(frozen=True)
class KnownNode:
    """The last receipt of a node that was found in order."""

    key: bytes
    charge: ChargeProof


def find_problems(
    receipt: SignedReceipt, expected: Mapping[str, object], known: KnownNode | None
) -> tuple[KnownNode | None, list[str]]:
    """Check a receipt, except for its epsilon.

    Parameters
    ----------
    receipt : SignedReceipt
        By anybody.
    expected : mapping
        What is known of the step: fields of `StepFacts`, all or most.
    known : KnownNode or None
        The node after its earlier receipts.

    Returns
    -------
    known : KnownNode or None
        The node after this receipt; None if it cannot be read.
    problems : list of str
    """
    try:
        facts, charge = receipt.parse()
    except ValueError as error:
        return None, [str(error)]
    found = [
        f"it was signed for another {name}"
        for name, value in expected.items()
        if (stated := getattr(facts, name)) != value or type(stated) is not type(value)
    ]
    if (charge.run, charge.steps) != (facts.session, facts.local_steps):
        found.append("another run or other steps were charged")
    if known is not None and known.key != receipt.key:
        found.append("its node signed with another key before")
    found += charge.find_problems(None if known is None else known.charge)
    return KnownNode(receipt.key, charge), found


def hash_arrays(arrays: Iterable[NDArray[np.generic]]) -> str:
    """Return the SHA-256 of the values of arrays, one after the other."""
    digest = hashlib.sha256()
    for array in arrays:
        # In C order and with the least byte first, as they are on the wire.
        values = np.ascontiguousarray(array)
        digest.update(values.astype(values.dtype.newbyteorder("<"), copy=False).data)
    return digest.hexdigest()


def encode_key(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return a public key as a compressed point."""
    return key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def decode_key(point: bytes) -> ec.EllipticCurvePublicKey:
    """Return the public key of a compressed point; its length names its curve.

    Raises
    ------
    ValueError
    """
    curves = {33: ec.SECP256R1(), 49: ec.SECP384R1(), 67: ec.SECP521R1()}
    if len(point) not in curves:
        raise ValueError(f"a key has {len(point)} bytes")
    return ec.EllipticCurvePublicKey.from_encoded_point(curves[len(point)], point)

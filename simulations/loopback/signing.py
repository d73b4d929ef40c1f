"""Sign calls of the Fleet API, as Flower's SuperNode does."""

from __future__ import annotations

import base64
from datetime import UTC, datetime

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from flwr_safedshb.node.flower_patches import fleet_api

Key = ec.EllipticCurvePrivateKey


def load_private_key(content: bytes) -> Key:
    """Load a node's private key, as ``ssh-keygen`` writes it."""
    key = serialization.load_ssh_private_key(content, None)
    if not isinstance(key, Key):
        raise ValueError("a node's key must be on an elliptic curve")
    return key


def public_key_pem(key: Key) -> bytes:
    """Return the public key of a private key in PEM, as calls carry it."""
    return key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def sign_headers(key: Key, when: datetime | None = None) -> dict[str, str]:
    """Return the headers by which a node proves who it is."""
    time = (when or datetime.now(UTC)).isoformat()
    signature = key.sign(time.encode(), ec.ECDSA(hashes.SHA256()))
    return {
        fleet_api.PUBLIC_KEY: base64.b64encode(public_key_pem(key)).decode(),
        fleet_api.SIGNATURE: base64.b64encode(signature).decode(),
        fleet_api.TIMESTAMP: time,
        "content-type": "application/protobuf",
    }

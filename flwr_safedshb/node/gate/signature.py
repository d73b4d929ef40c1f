"""Who signed a call: its public key, verified before the body is read."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from datetime import UTC, datetime

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from flwr_safedshb.node.flower_patches import fleet_api

# A key in PEM is some 220 bytes, a signature some 100.
_MAX_HEADER = 1024


class NotSignedError(ValueError):
    """The call carries no signature of a key over the present time."""


def verify_signature(headers: Mapping[str, str]) -> bytes:
    """Verify a call's signature and return the public key, in PEM, that made it.

    A SuperLink checks the same, and that the key is registered. It is checked here as
    well so that unsigned calls cost the SuperLink nothing.
    """
    try:
        texts = [headers[n] for n in (fleet_api.PUBLIC_KEY, fleet_api.SIGNATURE)]
        if max(map(len, texts)) > _MAX_HEADER:
            raise NotSignedError
        pem, signature = (base64.b64decode(text, validate=True) for text in texts)
        when = headers[fleet_api.TIMESTAMP]
        age = (datetime.now(UTC) - datetime.fromisoformat(when)).total_seconds()
        if not -fleet_api.MAX_LEAD < age < fleet_api.MAX_AGE:
            raise NotSignedError
        key = serialization.load_pem_public_key(pem)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise NotSignedError
        key.verify(signature, when.encode("ascii"), ec.ECDSA(hashes.SHA256()))
    except (
        *(KeyError, ValueError, TypeError, OverflowError, binascii.Error),
        *(InvalidSignature, UnsupportedAlgorithm),
    ) as error:
        raise NotSignedError("the call is not signed by a node's key") from error
    return pem

"""Whose call it is: the key that signed it, checked before its body is read."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from datetime import UTC, datetime

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from flwr_safedshb.flower import fleet

# A key in PEM is some 220 bytes, a signature some 100.
_MAX_TEXT = 1024


class NotSignedError(ValueError):
    """The call carries no signature of a key over the present time."""


def signer(headers: Mapping[str, str]) -> bytes:
    """Return the public key, in PEM, that a call is signed with.

    A SuperLink checks the same, and that the key is registered. It is checked here as
    well so that what nobody signed costs the SuperLink nothing.
    """
    try:
        texts = [headers[n] for n in (fleet.PUBLIC_KEY, fleet.SIGNATURE)]
        if max(map(len, texts)) > _MAX_TEXT:
            raise NotSignedError
        pem, signature = (base64.b64decode(text, validate=True) for text in texts)
        when = headers[fleet.TIMESTAMP]
        age = (datetime.now(UTC) - datetime.fromisoformat(when)).total_seconds()
        if not -fleet.MAX_LEAD < age < fleet.MAX_AGE:
            raise NotSignedError
        key = serialization.load_pem_public_key(pem)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise NotSignedError
        key.verify(signature, when.encode("ascii"), ec.ECDSA(hashes.SHA256()))
    except (
        KeyError,
        ValueError,
        TypeError,
        OverflowError,
        binascii.Error,
        InvalidSignature,
        UnsupportedAlgorithm,
    ) as error:
        raise NotSignedError("the call is not signed by a node's key") from error
    return pem

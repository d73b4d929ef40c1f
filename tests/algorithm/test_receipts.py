"""A receipt says what its node and server know, and nothing of the data."""

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, RecordDict

from flwr_safedshb.algorithm.receipts import (
    SignedReceipt,
    StepFacts,
    encode_key,
    find_problems,
    hash_arrays,
)
from flwr_safedshb.algorithm.refusal import RefusedError
from flwr_safedshb.privacy.ledger import ledger_file
from flwr_safedshb.privacy.ledger.ledger import Ledger
from flwr_safedshb.privacy.ledger.proof import ChargeProof
from tests.clients import PLAN, THETA, data, ledger, make, node

ASKED: dict[str, bool | bytes | float | int | str] = {
    "step": 0,
    "momentum": 0.5,
    "session": "run",
    "sign-receipt": True,
}
TIME = "2026-01-01T00:00:00.000+00:00"


def receive(context: Context, dataset: object) -> SignedReceipt:
    _, _, metrics = make(context, dataset=dataset).fit([*THETA], ASKED)
    receipt = SignedReceipt.from_records([metrics])
    assert receipt is not None
    return receipt


def test_other_examples_change_nothing_of_a_receipt_but_the_momentums_hash(
    tmp_path: Path,
) -> None:
    """Two nodes that differ in one example sign the same, but for what they send."""
    inputs, targets = data()
    changed = inputs.clone()
    changed[:] = 1e3
    texts = []
    for name, own in (("one", inputs), ("other", changed)):
        with mock.patch.object(ledger_file, "get_time", return_value=TIME):
            receipt = receive(node(tmp_path / name), (own, targets))
        texts.append(json.loads(receipt.text))
    momentums = [text.pop("momentum") for text in texts]
    assert momentums[0] != momentums[1]
    assert texts[0] == texts[1]


def test_a_node_signs_with_the_key_of_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    own = ec.generate_private_key(ec.SECP384R1())
    from cryptography.hazmat.primitives import serialization as form

    path.write_bytes(
        own.private_bytes(
            form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()
        )
    )
    context = node(tmp_path, receipt_key=str(path))
    assert receive(context, data()).key == encode_key(own.public_key())
    path.unlink()
    context = node(tmp_path, receipt_key=str(tmp_path / "missing"))
    with pytest.raises(RefusedError, match="key cannot be read"):
        make(context).fit([*THETA], {**ASKED, "step": 1})
    assert len(ledger(tmp_path).charges()) == 1


def test_the_key_beside_the_ledger_is_the_owners_alone(tmp_path: Path) -> None:
    first = receive(node(tmp_path), data()).key
    path = tmp_path / "state" / "receipts.key"
    assert path.stat().st_mode & 0o077 == 0
    assert receive(node(tmp_path), data()).key == first


def test_nothing_is_signed_unasked(tmp_path: Path) -> None:
    config = {key: value for key, value in ASKED.items() if key != "sign-receipt"}
    _, _, metrics = make(node(tmp_path)).fit([*THETA], config)
    assert [key for key in metrics if "receipt" in key] == []
    assert not (tmp_path / "state" / "receipts.key").exists()


def test_the_proof_of_a_charge_is_that_of_its_ledger(tmp_path: Path) -> None:
    own = Ledger(tmp_path / "l.sqlite", 50.0, 1e-5)
    own.charge(PLAN, 1, "other")
    own.commit([(PLAN, 3)], "run")
    own.charge(PLAN, 1, "run")
    first = own.prove_charge("run")
    own.charge(PLAN, 1, "other")
    own.charge(PLAN, 2, "run")
    second = own.prove_charge("run")
    assert (first.number, second.number) == (3, 5)
    assert first.find_problems(None) == second.find_problems(first) == []
    assert first.find_problems(second)
    assert second.epsilon == own.epsilon("run") == second.compute_epsilon()
    again = ChargeProof.from_dict(json.loads(json.dumps(second.to_dict())))
    assert again == second
    with pytest.raises(ValueError, match="has no charge"):
        own.prove_charge("nobody")


def test_hashes_are_those_of_the_bytes_on_the_wire() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert hash_arrays([array]) == hash_arrays([np.asfortranarray(array)])
    assert hash_arrays([array]) == hash_arrays([array.astype(">f4")])
    assert hash_arrays([array]) != hash_arrays([array + 1])


FACTS = StepFacts(7, "run", 0, 1, "a", "b")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"format": "safedshb receipt 1"}',
        b'{"format": "safedshb receipt 1", "charge": {}}',
        b"[" * 5000,
        b"\xff",
    ],
)
def test_no_receipt_of_an_adversary_raises(text: bytes) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    from flwr_safedshb.algorithm import receipts

    signature = key.sign(text, receipts._ALGORITHM)
    for point in (encode_key(key.public_key()), b"", b"\x02" * 49):
        found = find_problems(SignedReceipt(text, signature, point), vars(FACTS), None)
        assert found[0] is None
        assert found[1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("entry", [1]),
        ("entry", [1, "", "run", "charge", "[]", 1]),
        ("entry", [True, "", "run", "charge", PLAN.to_json(), 1]),
        ("entry", [1, "", "run", "charge", PLAN.to_json(), -1]),
        ("before", "not hexadecimal"),
        ("max_epsilon", float("nan")),
        ("delta", "small"),
        ("unit", "person"),
        ("epsilon", float("nan")),
        ("charged", [[PLAN.to_json(), 10**20]]),
        ("first", [["{}", 1]]),
        ("first", 7),
    ],
)
def test_no_proof_of_an_adversary_raises(
    field: str, value: object, tmp_path: Path
) -> None:
    own = Ledger(tmp_path / "l.sqlite", 50.0, 1e-5)
    own.charge(PLAN, 1, "run")
    charge = own.prove_charge("run").to_dict()
    content = {"format": "safedshb receipt 1", **vars(FACTS), "charge": charge}
    key = ec.generate_private_key(ec.SECP384R1())
    from flwr_safedshb.algorithm import receipts

    for changed in (False, True):
        charge[field] = value if changed else charge[field]
        text = json.dumps(content).encode()
        signed = key.sign(text, receipts._ALGORITHM)
        receipt = SignedReceipt(text, signed, encode_key(key.public_key()))
        known, problems = find_problems(receipt, vars(FACTS), None)
        assert bool(problems) == (known is None) == changed


def test_a_simulation_without_a_ledger_refuses_before_it_takes_a_step() -> None:
    client = make(Context(1, 2, {}, RecordDict(), {}))
    with pytest.raises(RefusedError, match="keeps no ledger"):
        client.fit([*THETA], ASKED)

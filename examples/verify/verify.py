"""Check a run of Safe-DSHB without data, without trust, and without its code.

    python verify.py model.npz

A second implementation of `safedshb verify` that shares nothing with it but the rule,
SMEA: signatures, hashes, the chain of charges, epsilon (by a privacy loss distribution
of its own, to 2 %), the rule's answer, and every step of the model.
"""

import hashlib
import json
import math
import re
import sys
from functools import cache
from pathlib import Path

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from scipy.special import ndtr

from flwr_safedshb.aggregation import SMEA

CURVES = {33: ec.SECP256R1(), 49: ec.SECP384R1(), 67: ec.SECP521R1()}
SPACING, POINTS = 2e-4, 2**20  # of the grid of privacy losses


def read_arrays(path):
    """Return the arrays of a file by name."""
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def sha256(arrays):
    """Return the hash of the values of arrays."""
    return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()


def open_receipt(entry):
    """Return what a node has signed; raise InvalidSignature if it has not."""
    point = bytes.fromhex(entry["key"])
    key = ec.EllipticCurvePublicKey.from_encoded_point(CURVES[len(point)], point)
    text, signature = entry["text"].encode(), bytes.fromhex(entry["signature"])
    key.verify(signature, text, ec.ECDSA(hashes.SHA384()))
    return json.loads(text)


def hash_entry(before, row):
    """Return the hash of a ledger's entry after another."""
    return hashlib.sha256(before + json.dumps(row).encode()).hexdigest()


def get_cost(text):
    """Return what the cost of a plan depends on, besides the unit."""
    names = ("batch_size", "noise_multiplier", "num_examples", "sampling", "unit")
    return [json.loads(text).get(name) for name in names]


@cache
def compute_epsilon(text, steps, delta):
    """Return epsilon of fixed-size batches, or None where this script knows no proof.

    One step is dominated by (1-q) N(0, s^2) + q N(1, s^2) against N(0, s^2), in this
    order for losses of at least 0 and in the other below (Zhu, Dong, Wang, 2022).
    """
    plan = json.loads(text)
    if plan["sampling"] == "poisson" or plan["adjacency"] != "replace-one":
        return None
    q, s = plan["batch_size"] / plan["num_examples"], plan["noise_multiplier"]
    losses = (np.arange(POINTS) - POINTS // 2) * SPACING
    edges = np.append(losses, losses[-1] + SPACING) - SPACING / 2
    # The x at which the loss of the first pair is |edge|.
    x = s * s * np.log1p(np.expm1(np.abs(edges)) / q) + 0.5
    above, below = ndtr(-x / s), ndtr((1 - x) / s)
    distribution = np.where(edges < 0, above, 1 - (1 - q) * above - q * below)
    masses = np.maximum(np.diff(distribution), 0.0)
    total = np.fft.irfft(np.fft.rfft(np.fft.ifftshift(masses)) ** steps, POINTS)
    total = np.maximum(np.fft.fftshift(total), 0.0)
    low, high = 0.0, losses[-1]
    while high - low > 1e-4:
        past = losses > (middle := (low + high) / 2)
        spent = total[past] @ -np.expm1(middle - losses[past])
        low, high = (middle, high) if spent > delta else (low, middle)
    return high


class Run:
    """A run that is being checked."""

    def __init__(self, checkpoint):
        arrays = read_arrays(checkpoint)
        self.about = json.loads(arrays["content"].tobytes())
        self.settings, self.names = self.about["settings"], self.about["names"]
        self.final = [arrays[f"model/{name}"] for name in self.names]
        self.folder = Path(checkpoint).with_suffix(".receipts")
        rule = re.fullmatch(
            r"SMEA\(max_nodes=(\d+), time_limit=None\)", self.settings["aggregation"]
        )
        self.rule = SMEA(int(rule[1]))  # this script knows no other
        self.problems, self.last = [], {}

    def expect(self, fine, text):
        """Note a problem, unless all is fine."""
        self.problems += [] if fine else [text]

    def check(self):
        """Check all rounds; return the problems."""
        after = None  # what the model must be after the round before
        for number in range(1, self.about["step"] + 1):
            path = self.folder / f"{number:06}"
            record = json.loads(path.with_suffix(".json").read_bytes())
            arrays = read_arrays(path.with_suffix(".npz"))
            after = self.check_round(number, record, arrays, after)
        self.compare("the end", self.final, after)
        return self.problems

    def compare(self, where, model, expected):
        """Compare a model with the one computed from the round before, if it is."""
        for value, (exact, scale) in zip(model, expected or (), strict=bool(expected)):
            near = (np.abs(value - exact) <= 5e-7 * scale).all()
            self.expect(near, f"{where}: the model does not follow")

    def check_round(self, number, record, arrays, after):
        """Check a round; return the model that must come next, if it can be known."""
        where, vectors = f"round {number}", []
        whole = self.settings["receipts"] == "momentums"
        for i, entry in enumerate(record["replies"]):
            if whole:
                vectors.append([arrays[f"{i}/{name}"] for name in self.names])
            self.check_receipt(where, number, record, entry, vectors)
        if whole:
            model = [arrays[f"model/{name}"] for name in self.names]
            self.expect(sha256(model) == record["model"], f"{where}: another model")
            self.compare(where, model, after)
            rows = [np.concatenate([x.ravel() for x in v]) for v in vectors]
            rows = rows - np.mean(rows, axis=0, dtype=np.float64)
            arrays["gram"] = rows @ rows.T
        n, f = len(record["replies"]), record["num_malicious_nodes"]
        self.expect(f <= self.settings["num_malicious_nodes"], f"{where}: f={f}")
        metrics = self.about["histories"]["train"][str(number)]
        if record["skipped"]:
            self.expect(n <= 2 * f, f"{where}: skipped with n={n}, f={f}")
            return [(x, np.abs(x) + 1) for x in model] if whole else None
        again = self.rule.weigh(arrays["gram"], f)
        weights = np.array(record["weights"])
        self.expect(np.allclose(weights, again.weights), f"{where}: another subset")
        for kappa in (record["kappa"], metrics["kappa"]):
            self.expect(math.isclose(kappa, again.kappa), f"{where}: another kappa")
        if not whole:
            return None
        rate, expected = self.settings["server_learning_rate"], []
        rate = rate[number - 1] if isinstance(rate, list) else rate
        self.expect(rate == record["learning_rate"], f"{where}: another rate")
        for theta, *layers in zip(model, *vectors, strict=True):
            mean = np.tensordot(weights, np.array(layers, np.float64), 1)
            move = rate * self.settings["local_steps"] * mean
            expected.append((theta - move, np.abs(theta) + np.abs(move)))
        return expected

    def check_receipt(self, where, number, record, entry, vectors):
        """Check what a node has signed."""
        where = f"{where}, node {entry['node']}"
        try:
            receipt = open_receipt(entry)
        except (InvalidSignature, ValueError, KeyError):
            return self.expect(False, f"{where}: the signature is wrong")
        steps, charge = self.settings["local_steps"], receipt["charge"]
        session, at = self.about["session"], (number - 1) * steps
        expected = [entry["node"], session, at, steps, record["model"]]
        expected += [sha256(vectors[-1])] if vectors else []
        names = ("node", "session", "step", "local_steps", "model", "momentum")
        for name, value in zip(names, expected, strict=False):
            self.expect(receipt[name] == value, f"{where}: another {name}")
        before, row = bytes.fromhex(charge["before"]), charge["entry"]
        charged = sum(count for _, count in charge["charged"])
        fine = hash_entry(before, row) == charge["head"]
        fine &= row[2:4] + row[5:] == [session, "charge", steps]
        fine &= get_cost(row[4]) in [get_cost(text) for text, _ in charge["charged"]]
        if (known := self.last.get(entry["node"])) is not None:
            key, past, total = known
            fine &= key == entry["key"] and row[0] > past["entry"][0]
            fine &= row[0] > past["entry"][0] + 1 or charge["before"] == past["head"]
            same = ("first", "max_epsilon", "delta", "unit")
            fine &= charged >= total + steps and all(charge[k] == past[k] for k in same)
        self.expect(fine, f"{where}: its ledger does not go on")
        self.last[entry["node"]] = entry["key"], charge, charged
        if len(charge["first"]) == 1 and charged <= charge["first"][0][1]:
            text, count = charge["first"][0]
            epsilon = compute_epsilon(text, count, charge["delta"])
            near = epsilon and math.isclose(charge["epsilon"], epsilon, rel_tol=0.02)
            self.expect(epsilon is None or near, f"{where}: another epsilon")
        return None


if __name__ == "__main__":
    found = Run(sys.argv[1]).check()
    print("\n".join(found) or "nothing is wrong")
    sys.exit(bool(found))

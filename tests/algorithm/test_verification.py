"""A run with receipts is checked by whoever has neither its data nor trust."""

import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context

from flwr_safedshb.algorithm.checkpoint import load_checkpoint, save
from flwr_safedshb.algorithm.receipts import SignedReceipt, StepFacts
from flwr_safedshb.algorithm.round_record import RoundRecord, name_folder
from flwr_safedshb.algorithm.signing import KEY_NAME, load_key
from flwr_safedshb.algorithm.verification import verify_run
from flwr_safedshb.app import client_app
from flwr_safedshb.cli import main
from flwr_safedshb.privacy.ledger.ledger_file import hash_entry
from flwr_safedshb.privacy.ledger.proof import ChargeProof
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.simulation.in_process import InProcessGrid
from flwr_safedshb.strategy import SafeDSHB
from tests.clients import PLAN, THETA, make

NODES, ROUNDS, F = 5, 4, 1


def nodes(folder: Path) -> InProcessGrid:
    """Return nodes that keep ledgers, and so can sign."""

    def config(partition: int) -> dict[str, Any]:
        state = {"state-dir": str(folder / f"node-{partition}")}
        limits = {"max-epsilon": 50.0, "delta": 1e-5, "require-secure-noise": False}
        return {**state, **limits}

    return InProcessGrid(client_app(make), NODES, node_config=config)


def model() -> ArrayRecord:
    return ArrayRecord({"weight": Array(THETA[0]), "bias": Array(THETA[1])})


def train(folder: Path, rounds: int = ROUNDS, **settings: Any) -> Path:
    """Run a federation with receipts; return its checkpoint."""
    path = folder / "model.npz"
    given = {"receipts": "momentums", "checkpoint": path, "seed": 1, **settings}
    SafeDSHB(
        num_malicious_nodes=F, server_learning_rate=0.1, momentum=0.5, **given
    ).start(nodes(folder), model(), rounds)
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("run"))


def load_script() -> Any:
    """Return the program that shares nothing with the package but the rule."""
    spec = importlib.util.spec_from_file_location("verify", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = Path(__file__).parents[2] / "examples" / "verify" / "verify.py"
script = load_script()


@dataclass(frozen=True)
class Case:
    """A copy of a run that somebody may tamper with."""

    path: Path

    @property
    def folder(self) -> Path:
        return name_folder(self.path)

    def change(self, number: int, edit: Callable[[RoundRecord], RoundRecord]) -> None:
        edit(RoundRecord.read(self.folder, number)).write(self.folder)

    def resign(
        self,
        number: int,
        node: int,
        edit: Callable[[StepFacts, ChargeProof], tuple[StepFacts, ChargeProof]],
    ) -> None:
        """Let a node sign something else, with its own key."""

        def change(record: RoundRecord) -> RoundRecord:
            replies = [*record.replies]
            name, receipt = replies[node]
            keys = [
                load_key(path) for path in self.path.parent.glob(f"node-*/{KEY_NAME}")
            ]
            signed = [SignedReceipt.sign(*edit(*receipt.parse()), key) for key in keys]
            (own,) = [one for one in signed if one.key == receipt.key]
            replies[node] = name, own
            return replace(record, replies=replies)

        self.change(number, change)


@pytest.fixture
def case(finished: Path, tmp_path: Path) -> Case:
    # Whoever writes a file of a run replaces it.
    shutil.copytree(finished.parent, tmp_path / "run", copy_function=os.link)
    return Case(tmp_path / "run" / finished.name)


def test_an_honest_run_is_in_order(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = verify_run(finished)
    assert found.problems == []
    assert (found.rounds, found.whole) == (ROUNDS, True)
    assert len(found.nodes) == NODES
    expected = PLAN.epsilon(ROUNDS, 1e-5)
    for known in found.nodes.values():
        assert known.charge.epsilon == pytest.approx(expected)
        assert sum(steps for _, steps in known.charge.charged) == ROUNDS
    assert script.Run(finished).check() == []
    assert main(["verify", str(finished)]) == 0
    assert "nothing is wrong" in capsys.readouterr().out


Tamper = Callable[[Case], None]


def server_tamperings(number: int, i: int) -> Iterator[tuple[str, Tamper]]:
    """Yield what somebody can do who has no key, to a round and a reply of it."""

    def record(name: str, edit: Callable[[RoundRecord], RoundRecord]) -> Any:
        return name, lambda case: case.change(number, edit)

    def arrays(record: RoundRecord, name: str, change: float) -> RoundRecord:
        values = record.arrays[name] + np.array(change, np.float32)
        return replace(record, arrays={**record.arrays, name: values})

    def swapped_subset(record: RoundRecord) -> RoundRecord:
        assert record.weights is not None
        weights = [*np.roll(record.weights, i + 1)]
        return replace(record, weights=weights)

    def swapped_receipts(record: RoundRecord) -> RoundRecord:
        replies = [*record.replies]
        (a, first), (b, second) = replies[i], replies[i - 1]
        replies[i], replies[i - 1] = (a, second), (b, first)
        return replace(record, replies=replies)

    def dropped_reply(record: RoundRecord) -> RoundRecord:
        kept = [n for n in range(len(record.replies)) if n != i]
        layers = {
            f"{new}/{name}": record.arrays[f"{old}/{name}"]
            for new, old in enumerate(kept)
            for name in ("weight", "bias")
        }
        model = {k: v for k, v in record.arrays.items() if k.startswith("model/")}
        weights = [1 / 3] * 3 + [0.0]
        return replace(
            record,
            replies=[record.replies[n] for n in kept],
            weights=weights,
            arrays={**model, **layers},
        )

    def changed_text(record: RoundRecord) -> RoundRecord:
        replies = [*record.replies]
        node, receipt = replies[i]
        text = receipt.text.replace(b'"step": ', b'"step": 1')
        replies[i] = node, replace(receipt, text=text)
        return replace(record, replies=replies)

    def metrics(case: Case) -> None:
        progress = load_checkpoint(case.path)
        progress.train[number]["kappa"] = 0.5 + i
        save(case.path, progress)

    yield record("swapped subset", swapped_subset)
    yield record("replaced momentum", lambda r: arrays(r, f"{i}/bias", 1e-3))
    yield record("replaced model", lambda r: arrays(r, "model/bias", 1e-3))
    yield record("swapped receipts", swapped_receipts)
    yield record("dropped reply", dropped_reply)
    yield record("changed receipt", changed_text)
    yield record("smaller f", lambda r: replace(r, num_malicious_nodes=0))
    yield record("smaller kappa", lambda r: replace(r, kappa=0.1 * (i + 1)))
    yield record("other rate", lambda r: replace(r, learning_rate=0.2 + i))
    yield record("pretended skip", lambda r: replace(r, skipped=True, weights=None))
    yield "changed metrics", metrics
    yield (
        "missing round",
        lambda case: (case.folder / f"{number:06}.json").unlink(),
    )
    yield (
        "repeated round",
        lambda case: replace(
            RoundRecord.read(case.folder, number % ROUNDS + 1), number=number
        ).write(case.folder),
    )


def node_tamperings(number: int, i: int) -> Iterator[tuple[str, Tamper]]:
    """Yield what a node can sign although its ledger says something else."""

    def charge(
        name: str, edit: Callable[[ChargeProof], ChargeProof]
    ) -> tuple[str, Tamper]:
        return name, lambda case: case.resign(
            number, i, lambda facts, proof: (facts, edit(proof))
        )

    def facts(name: str, **changes: Any) -> tuple[str, Tamper]:
        return name, lambda case: case.resign(
            number, i, lambda facts, proof: (replace(facts, **changes), proof)
        )

    def entry(proof: ChargeProof, before: str, at: int, value: object) -> ChargeProof:
        row = (*proof.entry[:at], value, *proof.entry[at + 1 :])
        head = hash_entry(bytes.fromhex(before), row).hex()
        return replace(proof, before=before, entry=row, head=head)

    def dropped_charge(proof: ChargeProof) -> ChargeProof:
        ((plan, steps),) = proof.charged
        return replace(proof, charged=((plan, steps - 1),))

    quiet = replace(PLAN, noise_multiplier=0.5).to_json()
    yield charge("dropped charge", dropped_charge)
    yield charge("rolled-back ledger", lambda p: entry(p, p.before, 0, p.number - 2))
    yield charge("another past", lambda p: entry(p, "ab" * 32, 1, p.entry[1]))
    yield charge("changed entry", lambda p: replace(p, head="00" * 32))
    yield charge("weaker plan", lambda p: entry(p, p.before, 4, quiet))
    yield charge("smaller epsilon", lambda p: replace(p, epsilon=p.epsilon / 2))
    yield charge("other limits", lambda p: replace(p, max_epsilon=60.0))
    yield charge("other run", lambda p: entry(p, p.before, 2, "elsewhere"))
    yield facts("other momentum", momentum="00" * 32)
    yield facts("other step", step=ROUNDS + 1)


GRID = [
    pytest.param(tamper, id=f"{name}, round {number}, reply {i}")
    for kinds in (server_tamperings, node_tamperings)
    for number in (2, 3, ROUNDS)
    for i in (0, 3)
    for name, tamper in kinds(number, i)
]


def test_the_script_is_short_and_imports_nothing_of_ours_but_the_rule() -> None:
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 200
    own = [line for line in text.splitlines() if "import" in line and "safe" in line]
    assert own == ["from flwr_safedshb.aggregation import SMEA"]


@pytest.mark.parametrize("plan", [PLAN, PrivacyPlan(1.0, 2.0, 25, 2763)])
def test_the_script_computes_epsilon_by_itself(plan: PrivacyPlan) -> None:
    for steps in (1, 20, 400):
        expected = plan.epsilon(steps, 1e-5)
        found = script.compute_epsilon(plan.to_json(), steps, 1e-5)
        assert found == pytest.approx(expected, rel=0.005, abs=2e-4)


def test_there_are_a_hundred_tamperings() -> None:
    assert len(GRID) >= 100


@pytest.mark.parametrize("tamper", GRID)
def test_a_tampered_run_is_found(tamper: Tamper, case: Case) -> None:
    tamper(case)
    assert verify_run(case.path).problems
    with suppress(FileNotFoundError):
        assert script.Run(case.path).check()


def test_another_model_or_card_at_the_end_is_found(case: Case) -> None:
    progress = load_checkpoint(case.path)
    weights = progress.arrays["weight"].numpy() + np.float32(1e-3)
    progress.arrays["weight"] = Array(weights)
    save(case.path, progress)
    problems = verify_run(case.path).problems
    assert any("at the end" in problem for problem in problems)
    assert any("model of the privacy card" in problem for problem in problems)


def test_a_card_that_states_less_is_found(case: Case) -> None:
    path = case.path.with_suffix(".privacy.json")
    card = json.loads(path.read_text())
    card["stated_by_nodes"]["epsilon"] = 0.1
    path.unlink()
    path.write_text(json.dumps(card))
    assert "stated_by_nodes" in verify_run(case.path).problems[0]


def test_a_run_that_somebody_made_up_is_found_by_the_owners_keys(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [known.key for known in verify_run(finished).nodes.values()]
    assert verify_run(finished, own).problems == []
    made_up = train(tmp_path, rounds=1)
    assert verify_run(made_up).problems == []
    assert len(verify_run(made_up, own).problems) == NODES
    # On the command line, as `ssh-keygen` and `openssl` write them.
    from cryptography.hazmat.primitives import serialization as form

    files = []
    for i in range(NODES):
        public = load_key(finished.parent / f"node-{i}" / KEY_NAME).public_key()
        kinds = [
            (form.Encoding.OpenSSH, form.PublicFormat.OpenSSH),
            (form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo),
        ]
        files.append(tmp_path / f"{i}.pub")
        files[i].write_bytes(public.public_bytes(*kinds[i % 2]))
    keys = ["--keys", *map(str, files)]
    assert main(["verify", str(finished), *keys]) == 0
    assert main(["verify", str(made_up), *keys, "--json"]) == 1
    printed = capsys.readouterr().out
    assert len(json.loads(printed[printed.index("\n{") :])["problems"]) == NODES


@pytest.mark.parametrize("output", ["average", "uniform"])
def test_the_model_that_is_returned_is_checked_too(output: str, tmp_path: Path) -> None:
    path = train(tmp_path, 4, output=output)
    assert verify_run(path).problems == []
    progress = load_checkpoint(path)
    assert progress.kept is not None
    progress.kept["bias"] = Array(progress.kept["bias"].numpy() * 1.01)
    save(path, progress)
    path.with_suffix(".privacy.json").unlink()
    (problem,) = verify_run(path).problems
    assert f"output='{output}'" in problem


def test_without_momentums_the_gram_matrices_are_checked(tmp_path: Path) -> None:
    path = train(tmp_path, 3, receipts="gram", local_steps=2)
    found = verify_run(path)
    assert found.problems == script.Run(path).check() == []
    assert not found.whole
    sizes = [file.stat().st_size for file in name_folder(path).glob("*.npz")]
    assert max(sizes) < 1000
    case = Case(path)

    def swap(record: RoundRecord) -> RoundRecord:
        assert record.weights is not None
        return replace(record, weights=[*np.roll(record.weights, 1)])

    case.change(2, swap)
    problems = verify_run(path).problems
    assert any("selects other replies" in p or "left-out" in p for p in problems)


def test_a_resumed_run_is_in_order(tmp_path: Path) -> None:
    """Its nodes answer once more, uncharged, in a round that the server forgot."""
    train(tmp_path, 2)
    first = (tmp_path / "model.npz").read_bytes()
    train(tmp_path, 3)
    (tmp_path / "model.npz").write_bytes(first)
    path = train(tmp_path, 4)
    found = verify_run(path)
    assert found.problems == script.Run(path).check() == []
    assert {sum(n for _, n in k.charge.charged) for k in found.nodes.values()} == {4}


def test_a_reply_without_a_receipt_is_excluded(tmp_path: Path) -> None:
    """Also one with the receipt of another node."""
    seen: list[Any] = []

    def spoil(context: Context) -> Any:
        client = make(context)
        whole = client.take_steps

        def steps(*asked: Any) -> Any:
            arrays, count, metrics = yield from whole(*asked)
            seen.append({k: v for k, v in metrics.items() if "receipt" in k})
            if context.node_config["partition-id"] == 3:
                metrics |= seen[0]
            if context.node_config["partition-id"] == 4:
                metrics = {k: v for k, v in metrics.items() if "receipt" not in k}
            return arrays, count, metrics

        vars(client)["take_steps"] = steps
        return client

    grid = nodes(tmp_path)
    grid._app = client_app(spoil)
    path = tmp_path / "model.npz"
    strategy = SafeDSHB(num_malicious_nodes=1, receipts="gram", checkpoint=path)
    result = strategy.start(grid, model(), 2)
    for found in result.train_metrics_clientapp.values():
        assert found["replies"] == 3
        assert found["excluded-no-receipt"] == 2
        # It proves nothing: a node may have lost its key.
        assert found["num-malicious-nodes"] == 1
    assert verify_run(path).problems == []


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"checkpoint": None}, "checkpoint"),
        ({"foreign_clients": True}, "foreign_clients=False"),
        ({"receipts": "all"}, "must be None"),
    ],
)
def test_receipts_that_nobody_could_check_are_refused(
    settings: dict[str, Any], reason: str
) -> None:
    given = {"receipts": "gram", "checkpoint": "model.npz", **settings}
    with pytest.raises(ValueError, match=reason):
        SafeDSHB(**given)


def test_a_run_without_receipts_is_not_called_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = train(tmp_path, 1, receipts=None)
    assert main(["verify", str(path)]) == 2
    assert "kept no receipts" in capsys.readouterr().err

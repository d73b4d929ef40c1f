"""A node's own file of examples: what is written is read, and trained on."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict, UserConfig

from flwr_safedshb.privacy.datasets import ArrayExamples
from simulations.app import make_client
from simulations.data.own import Own, load_own, main, save_own
from simulations.experiment import make_share

OVERRIDES = "num_nodes=3 num_malicious_nodes=1 data.num_examples=400"


def test_shares_are_written_as_own_files_and_make_the_same_client(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(tmp_path), *OVERRIDES.split()])
    assert len(capsys.readouterr().out.splitlines()) == 3
    path = tmp_path / "share-1.npz"
    assert path.stat().st_mode & 0o777 == 0o600
    config: UserConfig = {
        "data": str(path),
        "state-dir": str(tmp_path),
        "max-epsilon": 8.0,
        "delta": 1e-4,
        "require-secure-noise": False,
    }
    context = Context(1, 2, config, RecordDict(), {})
    client = make_client(OVERRIDES, context)
    expected = make_share(OVERRIDES, 1)
    assert client.plan == expected.plan
    assert isinstance(client.dataset, ArrayExamples)
    assert all(map(torch.equal, client.dataset.tensors, expected.examples))
    ours, theirs = client.model.state_dict(), expected.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert main([str(tmp_path), *OVERRIDES.split()]) == 2
    assert "share-0.npz is there already" in capsys.readouterr().err


def arrays() -> dict[str, object]:
    return {
        "inputs": np.ones((3, 2), np.float32),
        "labels": np.array([0, 1, 0]),
        "num_classes": 2,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": np.ones((3, 2))}, "float32"),
        ({"inputs": np.full((3, 2), np.nan, np.float32)}, "finite"),
        ({"labels": np.array([0, 1])}, "one for each"),
        ({"labels": np.array([0, 1, 2])}, "num_classes"),
        ({"labels": np.array([0, 1, -1])}, "num_classes"),
        ({"extra": 1}, "must hold inputs, labels, num_classes"),
        ({"inputs": np.array([object()] * 3)}, "pickle"),
    ],
)
def test_other_contents_are_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "own.npz"
    np.savez(path, **{**arrays(), **change})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        load_own(path)


def test_a_pickle_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    path.write_bytes(pickle.dumps(arrays()))
    with pytest.raises(ValueError, match="pickle"):
        load_own(path)


def test_round_trip(tmp_path: Path) -> None:
    own = Own((torch.rand(4, 1, 2, 2), torch.tensor([3, 0, 1, 2])), 5)
    save_own(tmp_path / "own.npz", own)
    found = load_own(tmp_path / "own.npz")
    assert found.num_classes == 5
    assert all(map(torch.equal, found.examples, own.examples))

import gzip
import struct
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from simulations import data
from simulations.data import (
    BreastCancer,
    ByLabel,
    Digits,
    Dirichlet,
    FashionMNIST,
    FLChain,
    Iid,
    Libsvm,
    Phishing,
    Source,
    Split,
    Synthetic,
    Table,
    flip_labels,
    split_data,
)
from simulations.data.federation import _federated
from tests.phishing import ROWS, StandIn

SPLITS: list[Split] = [Iid(), ByLabel(), Dirichlet(0.3, 5)]


# Files, and what needs none.


def test_any_libsvm_file_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "some"
    path.write_text("+1 1:0.5 3:-2\n-1 2:1 # a comment\n+1 1:1\n-1 3:4\n")
    table = Libsvm(str(path), None, 0.25).load()
    assert table.inputs.tolist() == [[0.5, 0, -2], [0, 1, 0], [1, 0, 0], [0, 0, 4]]
    assert table.labels.tolist() == [1, 0, 1, 0]
    assert (table.num_classes, table.test) == (2, 0.25)
    assert Libsvm(str(path), 5, 0.0).load().inputs.shape == (4, 5)
    path.write_text("7 1:1\n3 1:1\n5 1:1\n")
    assert Libsvm(str(path), None, 0.0).load().labels.tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("content", "num_features"), [("0 5:1\n", 4), ("a b c\n", None), ("1 0:1\n", None)]
)
def test_a_bad_libsvm_file_is_named(
    tmp_path: Path, content: str, num_features: int | None
) -> None:
    path = tmp_path / "bad"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"{path} is not a LIBSVM file"):
        Libsvm(str(path), num_features, 0.0).load()
    with pytest.raises(FileNotFoundError, match=r"data\.path='nowhere'"):
        Libsvm("nowhere", None, 0.0).load()


def idx(array: NDArray[np.uint8]) -> bytes:
    head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return head + array.tobytes()


def write_fashion(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for part, count in (("train", 12), ("t10k", 3)):
        images = rng.integers(0, 256, (count, 28, 28), np.uint8)
        images[0, 0, 0] = 255
        labels = np.arange(count, dtype=np.uint8) % 10
        name = f"{part}-images-idx3-ubyte.gz"
        (folder / name).write_bytes(gzip.compress(idx(images)))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))


def test_fashion_mnist_keeps_its_published_test_set(tmp_path: Path) -> None:
    write_fashion(tmp_path)
    table = FashionMNIST(str(tmp_path)).load()
    assert table.inputs.shape == (15, 1, 28, 28)
    assert table.inputs[0, 0, 0, 0] == 1.0
    assert table.labels.tolist() == [*range(10), 0, 1, 0, 1, 2]
    fed = split_data(FashionMNIST(str(tmp_path)), Iid(), 3, 1)
    assert fed.held_out
    assert fed.sizes == (4, 4, 4)
    assert sorted(fed.test[1].tolist()) == [0, 1, 2]
    published = {row.tobytes() for row in table.inputs[12:]}
    assert {row.numpy().tobytes() for row in fed.test[0]} == published


def test_fashion_mnist_errors_name_file_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"dataset-fashion-mnist.*data.path"):
        FashionMNIST(str(tmp_path)).load()
    write_fashion(tmp_path)
    packed = tmp_path / "train-images-idx3-ubyte.gz"
    whole = packed.read_bytes()
    packed.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=f"{packed} is damaged"):
        FashionMNIST(str(tmp_path)).load()
    plain = tmp_path / "train-images-idx3-ubyte"
    good = gzip.decompress(whole)
    for bad in (b"", good[:9], good[:-1], good + b"0", b"\0\0\x0d" + good[3:]):
        plain.write_bytes(bad)
        with pytest.raises(ValueError, match=f"{plain} is no IDX file"):
            FashionMNIST(str(tmp_path)).load()


@pytest.mark.parametrize(
    ("source", "shape", "classes"),
    [
        (BreastCancer(0.2), (569, 30), 2),
        (Digits(0.2), (1797, 1, 8, 8), 10),
        (Synthetic(50, 6, 0, 0.2), (50, 6), 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_bundled_data(source: Source, shape: tuple[int, ...], classes: int) -> None:
    table = source.load()
    assert table.inputs.shape == shape
    assert table.inputs.dtype == np.float32
    assert np.abs(table.inputs).max() <= 1
    assert set(table.labels.tolist()) == set(range(classes))
    assert table.num_classes == classes
    assert np.array_equal(table.inputs, source.load().inputs)


def test_an_input_is_scaled_whatever_the_other_examples_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A mean or a maximum of the examples would differ without some of them.
    import sklearn.datasets

    for name, source in (
        ("load_breast_cancer", BreastCancer(0.0)),
        ("load_digits", Digits(0.0)),
    ):
        whole = source.load()
        inputs, labels = getattr(sklearn.datasets, name)(return_X_y=True)
        few = (inputs[:20], labels[:20])
        monkeypatch.setattr(sklearn.datasets, name, lambda return_X_y, few=few: few)
        assert np.array_equal(source.load().inputs, whole.inputs[:20])


def test_patients_whose_outcome_is_not_known_are_left_out() -> None:
    pytest.importorskip("sksurv", reason="pip install flwr-safedshb[medical]")
    table = FLChain(0.2).load()
    assert table.inputs.shape == (6834, 35)
    # 2,169 patients died; few of them after ten years.
    assert table.labels.sum() == 1764
    assert np.abs(table.inputs).max() < 1.1


def test_breast_cancer_measures_fill_their_ranges() -> None:
    inputs = BreastCancer(0.0).load().inputs
    # Far from it if a constant belonged to another measure.
    assert (inputs.max(axis=0) > 0.6).all()
    assert (inputs.min(axis=0) < -0.2).all()
    assert ((np.abs(inputs) == 1).mean(axis=0) < 0.03).all()


# Federations.


@dataclass(frozen=True)
class Numbered:
    """Inputs are row numbers, so every example can be followed; labels as given."""

    count: int
    classes: int
    test: float

    def load(self) -> Table:
        rows = np.arange(self.count)
        return Table(
            rows[:, np.newaxis].astype(np.float32),
            rows % self.classes,
            self.classes,
            self.test,
        )


def numbers(examples: data.Examples) -> list[int]:
    return [int(value) for value in examples[0].flatten()]


@pytest.mark.parametrize("split", SPLITS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("test_fraction", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(4))
def test_every_example_has_one_place(
    split: Split, test_fraction: float, seed: int
) -> None:
    source = Numbered(203, 3, test_fraction)
    fed = split_data(source, split, 4, seed)
    held = [number for shard in fed.shards for number in numbers(shard)]
    tested = numbers(fed.test)
    assert len(set(held)) == len(held)
    assert sum(fed.sizes) == len(held) == len(numbers(fed.training))
    assert held == numbers(fed.training)
    training = 203 - int(203 * test_fraction)
    assert fed.left_over == training - len(held)
    assert fed.held_out == (test_fraction > 0)
    if fed.held_out:
        assert len(tested) == int(203 * test_fraction)
        assert not set(tested) & set(held)
        assert fed.overlap.seen == 0
    else:
        assert sorted(tested) == list(range(203))
    for inputs, labels in (*fed.shards, fed.test):
        assert inputs.dtype == torch.float32
        assert labels.dtype == torch.int64
        assert labels.tolist() == [int(x) % 3 for x in inputs.flatten()]


@pytest.mark.parametrize("split", SPLITS, ids=lambda s: type(s).__name__)
def test_seeds_decide(split: Split) -> None:
    def drawn(seed: int) -> tuple[list[list[int]], list[int]]:
        _federated.cache_clear()
        fed = split_data(Numbered(100, 2, 0.2), split, 4, seed)
        return [numbers(shard) for shard in fed.shards], numbers(fed.test)

    assert drawn(1) == drawn(1)
    assert drawn(1)[0] != drawn(2)[0]
    assert drawn(1)[1] != drawn(2)[1]
    # The test set stays whoever holds the rest.
    assert drawn(1)[1] == numbers(split_data(Numbered(100, 2, 0.2), Iid(), 7, 1).test)


def test_data_are_loaded_once() -> None:
    loads = []

    @dataclass(frozen=True)
    class Counted(Numbered):
        def load(self) -> Table:
            loads.append(self)
            return super().load()

    source = Counted(40, 2, 0.25)
    feds = [split_data(source, Iid(), 4, seed) for seed in (1, 1, 2)]
    assert feds[0] is feds[1]
    assert len(loads) == 1
    # Shards cost no memory beside the whole.
    storage = feds[0].training[0].untyped_storage().data_ptr()
    for shard in feds[0].shards:
        assert shard[0].untyped_storage().data_ptr() == storage


def test_iid_and_by_label_give_equal_parts() -> None:
    labels = np.random.default_rng(0).integers(0, 4, 403)
    for split in (Iid(), ByLabel()):
        parts = split(labels, 4, np.random.default_rng(0))
        assert [len(part) for part in parts] == [100] * 4
    # One label after the other: a part of 100 holds two labels or at most three.
    found = [sorted(set(labels[part].tolist())) for part in parts]
    assert all(len(kinds) <= 3 for kinds in found)
    assert [kinds[0] for kinds in found] == sorted(kinds[0] for kinds in found)
    assert [kinds[-1] for kinds in found] == sorted(kinds[-1] for kinds in found)
    assert found[0] != found[-1]


def test_by_label_leaves_over_what_comes_last_not_the_last_label() -> None:
    labels = np.array([1] * 3 + [0] * 8)
    parts = ByLabel()(labels, 4, np.random.default_rng(0))
    assert [labels[part].tolist() for part in parts] == [[0, 0], [0, 0], [0, 1], [1, 1]]


def imbalance(alpha: float, labels: NDArray[np.int64]) -> float:
    """Variance of a label's shares, averaged over labels and draws, n = 5."""
    variances = []
    for seed in range(200):
        parts = Dirichlet(alpha, 0)(labels, 5, np.random.default_rng(seed))
        assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
        for label in range(3):
            held = [np.count_nonzero(labels[part] == label) for part in parts]
            variances.append(np.var(np.array(held) / np.sum(held)))
    return float(np.mean(variances))


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_dirichlet_shares_have_its_variance(alpha: float) -> None:
    labels = np.arange(3000) % 3
    # Of Dir(alpha, ..., alpha) over n nodes: (1/n)(1 - 1/n)/(n alpha + 1); the mean
    # share is 1/n in every draw.
    expected = 0.2 * 0.8 / (5 * alpha + 1)
    assert imbalance(alpha, labels) == pytest.approx(expected, rel=0.1)
    assert imbalance(2 * alpha, labels) != pytest.approx(expected, rel=0.1)


def test_dirichlet_draws_again_until_all_hold_enough() -> None:
    labels = np.arange(400) % 2
    rng = partial(np.random.default_rng, 0)
    assert min(map(len, Dirichlet(0.1, 0)(labels, 4, rng()))) < 40
    assert min(map(len, Dirichlet(0.1, 40)(labels, 4, rng()))) >= 40
    with pytest.raises(ValueError, match=r"1000 draws.*min_examples=100.*raise split"):
        Dirichlet(0.1, 100)(labels, 4, rng())
    with pytest.raises(ValueError, match="alpha=0"):
        Dirichlet(0, 1)


def test_phishing_as_in_the_paper(real_phishing: Path) -> None:
    fed = split_data(Phishing(str(real_phishing), 0.0), Iid(), 4, 1)
    assert fed.sizes == (2763,) * 4
    assert fed.left_over == 3
    summary = fed.summary()
    assert summary["test_set"] == "training examples"
    assert summary["test_examples"] == 11055
    # Two thirds: a test set drawn from these data says little about unseen pages.
    fed = split_data(Phishing(str(real_phishing), 0.2), Iid(), 4, 1)
    assert fed.sizes == (2211,) * 4
    assert 0.6 < fed.overlap.seen / fed.overlap.tested < 0.75


def test_examples_on_both_sides_are_counted(stand_in: StandIn) -> None:
    fed = split_data(stand_in.source(0.2), Iid(), 4, 1)
    held_out = int(ROWS * 0.2)
    assert fed.sizes == ((ROWS - held_out) // 4,) * 4
    trained = list(zip(*[part.tolist() for part in fed.training], strict=True))
    labels_of: dict[tuple[float, ...], set[int]] = {}
    for row, label in trained:
        labels_of.setdefault(tuple(row), set()).add(label)
    tested = list(zip(*[part.tolist() for part in fed.test], strict=True))
    seen = [pair for pair in tested if tuple(pair[0]) in labels_of]
    other = [pair for pair in seen if labels_of[tuple(pair[0])] - {pair[1]}]
    assert fed.overlap == data.Overlap(held_out, len(seen), len(other))
    assert held_out > len(seen) > len(other) > 0
    summary = fed.summary()
    assert summary["test_set"] == "held-out examples"
    assert summary["test_examples_also_in_training"] == len(seen)
    assert summary["test_examples_with_another_label_in_training"] == len(other)


def test_a_node_with_less_than_a_batch_is_named() -> None:
    fed = split_data(Numbered(200, 2, 0.0), Dirichlet(0.5, 5), 4, 0)
    smallest = min(fed.sizes)
    assert len(set(fed.sizes)) > 1
    fed.check_batch_size(smallest)
    node = fed.sizes.index(smallest)
    wanted = rf"node {node} holds num_examples={smallest}, .*{smallest + 1}; lower"
    with pytest.raises(ValueError, match=wanted):
        fed.check_batch_size(smallest + 1)


@pytest.mark.parametrize(
    ("source", "count", "words"),
    [
        (Numbered(10, 2, 1.0), 2, r"test_fraction=1.0 must lie in \[0, 1\)"),
        (Numbered(10, 2, -0.1), 2, r"test_fraction=-0.1 must lie in \[0, 1\)"),
        (Numbered(10, 2, 0.05), 2, "test_fraction=0.05 of 10 examples"),
        (Numbered(10, 2, 0.5), 6, "5 training examples are too few for 6 nodes"),
        (Numbered(10, 2, 0.5), 0, "count=0 must be at least 1"),
    ],
)
def test_bad_settings_are_refused(source: Source, count: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split_data(source, Iid(), count, 0)


def test_bad_tables_are_refused() -> None:
    inputs, labels = np.zeros((3, 1), np.float32), np.zeros(3, np.int64)
    with pytest.raises(ValueError, match="3 inputs and 2 labels"):
        Table(inputs, labels[:2], 2, 0.0)
    inputs[1] = np.nan
    with pytest.raises(ValueError, match="finite"):
        Table(inputs, labels, 2, 0.0)


def test_label_flippers_hold_honest_inputs_and_flipped_labels() -> None:
    fed = split_data(Numbered(40, 5, 0.0), Iid(), 4, 0)
    inputs, labels = fed.shards[0]
    before = labels.clone()
    same, turned = flip_labels(fed.shards[0], fed.num_classes)
    assert same is inputs
    assert turned.tolist() == [4 - int(label) for label in before]
    assert turned.dtype == torch.int64
    assert torch.equal(labels, before)
    two = split_data(Numbered(40, 2, 0.0), Iid(), 4, 0).shards[0]
    assert flip_labels(two, 2)[1].tolist() == [1 - int(label) for label in two[1]]

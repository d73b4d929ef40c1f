"""Every file under conf/ makes what it says, and wrong overrides are refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException, HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf

from flwr_safedshb.aggregation import Rule
from flwr_safedshb.attacks import Attack
from flwr_safedshb.privacy.plan import PrivacyPlan
from simulations.data import Dirichlet, Libsvm, Phishing, Synthetic, split_data
from simulations.models import build_model, classification_loss
from tests.phishing import StandIn

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
LEAVES = [
    (str(path.parent.relative_to(CONF)), path.stem)
    for path in sorted(CONF.rglob("*.yaml"))
    if path.parent != CONF
]


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base=None):
        return compose("config", overrides=list(overrides))


def of(group: str) -> list[str]:
    found = [leaf for folder, leaf in LEAVES if folder == group]
    assert found, f"conf/{group} is empty"
    return found


def test_no_group_is_without_a_test() -> None:
    tested = {"aggregation", "attack", "data", "engine", "experiment", "model"}
    # Schedules need data and a model: test_schedules.py.
    tested |= {"logger", "privacy", "schedule", "split"}
    assert {group for group, _ in LEAVES} <= tested


@pytest.mark.parametrize("leaf", of("aggregation"))
def test_aggregation(leaf: str) -> None:
    rule = instantiate(composed(f"aggregation={leaf}").aggregation)
    assert isinstance(rule, Rule)
    vectors = np.random.default_rng(0).normal(size=(7, 4))
    assert rule(vectors, 1).shape == (4,)


@pytest.mark.parametrize("leaf", of("attack"))
def test_attack(leaf: str) -> None:
    cfg = composed(f"attack={leaf}")
    if leaf == "none":
        assert "_target_" not in cfg.attack
        return
    attack = instantiate(cfg.attack)
    assert isinstance(attack, Attack)
    if attack.replaces_vectors:
        rng = np.random.default_rng(0)
        rule = instantiate(cfg.aggregation)
        assert attack(rng.normal(size=(4, 5)), 3, rng, rule).shape == (3, 5)


@pytest.mark.parametrize("leaf", of("privacy"))
def test_privacy(leaf: str) -> None:
    privacy = composed(f"privacy={leaf}").privacy
    plan = instantiate(privacy.plan, num_examples=2763)
    assert isinstance(plan, PrivacyPlan)
    if plan.noise_multiplier > 0:
        assert 0 < plan.epsilon(steps=1, delta=privacy.delta) < 10
    # The paper's regimes.
    regimes = {"low": 1.0, "moderate": 2.0, "high": 3.0}
    assert plan.noise_multiplier == regimes.get(leaf, plan.noise_multiplier)


@pytest.mark.parametrize("leaf", of("data"))
def test_data(leaf: str, stand_in: StandIn) -> None:
    more = stand_in.overrides if leaf.startswith("phishing") else []
    more = stand_in.overrides[:1] if leaf == "libsvm" else more
    source = instantiate(composed(f"data={leaf}", *more).data)
    hash(source)
    if leaf == "fashion-mnist":
        return  # its files need not be on this machine
    fed = split_data(source, instantiate(composed().split), 4, 1)
    assert fed.held_out == (leaf != "phishing")
    assert min(fed.sizes) >= 25


@pytest.mark.parametrize("leaf", of("split"))
def test_split(leaf: str) -> None:
    words = [f"split={leaf}", "privacy.plan.batch_size=17"]
    if leaf == "unequal":
        words.append("split.sizes=[20,30,40,710]")
    split = instantiate(composed(*words).split)
    fed = split_data(Synthetic(1000, 3, 0, 0.2), split, 4, 1)
    fed.check_batch_size(17)
    if leaf == "dirichlet":
        assert split == Dirichlet(1.0, 17)


@pytest.mark.parametrize("leaf", of("model"))
def test_model(leaf: str) -> None:
    make = instantiate(composed(f"model={leaf}").model, _partial_=True)
    for classes in (2, 10):
        model = build_model(make, (1, 8, 8), classes, seed=1)
        labels = torch.tensor([1, 0])
        losses = classification_loss(model(torch.rand(2, 1, 8, 8)), labels)
        assert losses.shape == (2,)


@pytest.mark.parametrize("leaf", of("engine"))
def test_engine(leaf: str) -> None:
    assert composed(f"engine={leaf}").engine.name == leaf


@pytest.mark.parametrize("leaf", of("logger"))
def test_logger(leaf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As where the packages of all loggers are installed.
    monkeypatch.setattr("simulations.results.loggers.find_spec", lambda name: name)
    logger = composed(f"logger={leaf}").logger
    assert ("_target_" in logger) == (leaf != "none")
    if leaf != "none":
        assert callable(instantiate(logger))


@pytest.mark.parametrize("leaf", of("experiment"))
def test_experiment(leaf: str) -> None:
    cfg = composed(f"experiment={leaf}")
    OmegaConf.resolve(cfg)
    for part in cfg.values():
        if isinstance(part, DictConfig) and "_target_" in part:
            instantiate(part, _partial_=part is cfg.model)
    plan = instantiate(cfg.privacy.plan, num_examples=10**6)
    assert plan.batch_size == cfg.privacy.plan.batch_size


def test_the_papers_settings(stand_in: StandIn) -> None:
    paper, benchmark = composed("experiment=paper"), composed("experiment=dp-dsgd")
    assert (paper.num_nodes, paper.num_malicious_nodes) == (7, 3)
    assert (benchmark.num_nodes, benchmark.num_malicious_nodes) == (4, 0)
    assert (paper.momentum, benchmark.momentum) == (0.99, 0.0)
    for cfg in (paper, benchmark):
        assert (cfg.steps, cfg.server_learning_rate, cfg.weight_decay) == (400, 1, 1e-4)
        plan = cfg.privacy.plan
        assert (plan.batch_size, plan.clip_norm, cfg.privacy.delta) == (25, 1, 1e-4)
        assert instantiate(cfg.data) == Phishing(None, 0.0)
        data = split_data(stand_in.source(), instantiate(cfg.split), 4, cfg.seed)
        make = instantiate(cfg.model, _partial_=True)
        model = build_model(make, data.input_shape, data.num_classes, cfg.seed)
        assert sum(p.numel() for p in model.parameters()) == 69


def test_a_model_of_the_users_own() -> None:
    cfg = composed(
        "model._target_=torch.nn.Linear",
        "+model.in_features=68",
        "+model.out_features=1",
    )
    model = build_model(instantiate(cfg.model, _partial_=True), (68,), 2, 0)
    assert isinstance(model, torch.nn.Linear)


def test_phishing_has_no_path_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert instantiate(composed("data=phishing").data) == Phishing(None, 0.0)
    path = instantiate(composed("data=phishing", "data.path=/some/file").data).path
    assert path == "/some/file"
    monkeypatch.setenv("SAFEDSHB_DATA", "/some/folder")
    assert instantiate(composed("data=phishing").data) == Phishing("/some/folder", 0.0)


def test_libsvm_needs_its_path() -> None:
    cfg = composed("data=libsvm", "data.path=/some/file")
    assert instantiate(cfg.data) == Libsvm("/some/file", None, 0.2)
    with pytest.raises(MissingMandatoryValue, match=r"data\.path"):
        instantiate(composed("data=libsvm").data)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data=nothing", "Could not find 'data/nothing'"),
        ("stepz=3", "Could not override 'stepz'"),
        ("data.test_fractoin=0.1", r"Could not override 'data\.test_fractoin'"),
        ("steps", "Error parsing override 'steps'"),
    ],
)
def test_a_wrong_override_is_refused(override: str, words: str) -> None:
    with pytest.raises((ConfigCompositionException, HydraException), match=words):
        composed(override)

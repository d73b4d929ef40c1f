"""Mods that spoil a reply are refused, wherever they are, before anything is spent."""

import sys
from functools import partial
from pathlib import Path

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client import Client
from flwr.client import mod as client_mods
from flwr.clientapp import ClientApp
from flwr.clientapp import mod as clientapp_mods
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common.secure_aggregation.secaggplus_constants import (
    RECORD_KEY_CONFIGS,
    Key,
    Stage,
)

from flwr_safedshb.algorithm.refusal import RefusedError
from flwr_safedshb.app import client_app
from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.flower.compat import set_process_run
from tests.clients import THETA, ledger, make, node

LEGACY = ("fitins.parameters", "fitins.config")
MESSAGE = ("arrays", "config")


class Named(clientapp_mods.LocalDpMod):
    """A mod of a user's own, built on Flower's."""

    def __call__(
        self, msg: Message, ctxt: Context, call_next: ClientAppCallable
    ) -> Message:
        return super().__call__(msg, ctxt, call_next)


SPOILING: dict[str, Mod] = {
    "LocalDpMod": clientapp_mods.LocalDpMod(1.0, 1.0, 1.0, 1e-5),
    "fixedclipping_mod": clientapp_mods.fixedclipping_mod,
    "adaptiveclipping_mod": clientapp_mods.adaptiveclipping_mod,
    "of NumPyClients: LocalDpMod": client_mods.LocalDpMod(1.0, 1.0, 1.0, 1e-5),
    "of NumPyClients: fixedclipping_mod": client_mods.fixedclipping_mod,
    "of NumPyClients: adaptiveclipping_mod": client_mods.adaptiveclipping_mod,
    "subclass of LocalDpMod, Named": Named(1.0, 1.0, 1.0, 1e-5),
    "secaggplus_mod": client_mods.secaggplus_mod,
    "secagg_mod": client_mods.secagg_mod,
}


def message(keys: tuple[str, str], **more: ConfigRecord) -> Message:
    config = ConfigRecord({"step": 0, "momentum": 0.5, "clipping_norm": 1.0})
    set_process_run(1)
    content = RecordDict({keys[0]: ArrayRecord([*THETA]), keys[1]: config, **more})
    return Message(content, dst_node_id=2, message_type="train")


def client_fn(context: Context) -> SafeDSHBClient:
    return make(context)


def legacy(mods: list[Mod]) -> ClientApp:
    return ClientApp(
        client_fn=lambda context: client_fn(context).to_client(), mods=mods
    )


def outer(mods: list[Mod]) -> ClientApp:
    """Return an app of a user's own around the private one."""
    app, inner = ClientApp(mods=mods), client_app(client_fn)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return inner(message, context)

    return app


@pytest.fixture
def any_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """SecAgg+ calls the client in its third stage; take it for the first."""
    for check in ("check_stage", "check_configs"):
        module = sys.modules[client_mods.secaggplus_mod.__module__]
        monkeypatch.setattr(module, check, lambda *_: None)


@pytest.mark.usefixtures("any_stage")
@pytest.mark.parametrize("name", SPOILING)
def test_mods_around_a_numpy_client(name: str, tmp_path: Path) -> None:
    stage = {Key.STAGE: Stage.COLLECT_MASKED_VECTORS}
    secagg = {RECORD_KEY_CONFIGS: ConfigRecord({**stage})}
    more = secagg if "secagg" in name else {}
    with pytest.raises(RefusedError, match=f"^{name.split()[-1]} "):
        legacy([SPOILING[name]])(message(LEGACY, **more), node(tmp_path))
    assert not ledger(tmp_path).charges()


@pytest.mark.parametrize(
    "name", [name for name in SPOILING if "Num" not in name and "secagg" not in name]
)
def test_mods_around_an_app_around_the_client(name: str, tmp_path: Path) -> None:
    mods = [clientapp_mods.message_size_mod, SPOILING[name]]
    with pytest.raises(RefusedError, match=rf"^{name.split()[-1]} .* mods$"):
        outer(mods)(message(MESSAGE), node(tmp_path))
    assert not ledger(tmp_path).charges()


def test_mods_that_only_look_are_welcome(tmp_path: Path) -> None:
    mods: list[Mod] = [
        clientapp_mods.message_size_mod,
        clientapp_mods.arrays_size_mod,
    ]
    assert outer(mods)(message(MESSAGE), node(tmp_path)).has_content()
    assert legacy(mods)(message(LEGACY), node(tmp_path)).has_content()
    assert len(ledger(tmp_path).charges()) == 1  # the same request of the same run


def looking(
    message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    return call_next(message, context)


class Counting:
    """A mod that is an object."""

    def __call__(
        self, message: Message, context: Context, call_next: ClientAppCallable
    ) -> Message:
        return call_next(message, context)


@pytest.mark.parametrize("mod", [looking, Counting(), partial(looking)])
def test_mods_that_nobody_knows_are_refused_until_they_are_named(
    mod: Mod, tmp_path: Path
) -> None:
    def app(*trusted: Mod) -> ClientApp:
        def trusting(context: Context) -> Client:
            return make(context, trusted_mods=trusted).to_client()

        return ClientApp(client_fn=trusting, mods=[mod])

    with pytest.raises(RefusedError, match="is not known to leave the reply"):
        app()(message(LEGACY), node(tmp_path))
    with pytest.raises(RefusedError, match="name it in trusted_mods"):
        app(Counting())(message(LEGACY), node(tmp_path))
    assert not ledger(tmp_path).charges()
    assert app(mod)(message(LEGACY), node(tmp_path)).has_content()
    assert len(ledger(tmp_path).charges()) == 1

"""A run may choose and set what is there, and reach nothing else on a node."""

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp

from flwr_safedshb.algorithm.refusal import RefusedError
from flwr_safedshb.flower.compat import set_process_run
from simulations.app import OVERRIDES, client_app, make_client_app
from simulations.experiment import build_untrained
from simulations.overrides import check_plain

MODEL = build_untrained("")
HARMLESS = (
    "engine=deployment engine.max_epsilon=4 privacy=high privacy.delta=1e-5 "
    "privacy.plan.sampling=poisson experiment=null 'checkpoint=/tmp/a b.npz' "
    "num_nodes=3 aggregation=nnm model=mlp model.hidden=[8,4]"
)
HOSTILE = [
    "privacy.plan._target_=os.system",
    "data={_target_:os.system,command:id}",
    "data.path={_target_:os.system}",
    "'model.hidden=[8,{_target_:os.getcwd}]'",
    "+own._target_=os.system",
    "++data._target_=os.system",
    "+engine.extra=1",
    "~engine.seeded_noise",
    "~privacy",
    "hydra.searchpath=[file:///tmp]",
    "hydra/launcher=basic",
    "data@privacy=synthetic",
    "'checkpoint=${oc.env:HOME}'",
    "'checkpoint=a${oc.env:HOME}'",
    "'model.hidden=[${oc.env:HOME}]'",
    "'checkpoint=str(${seed})'",
    "data=../../../tmp/evil",
    "data=/tmp/evil",
    "data=nowhere",
    "aggregation=[smea,filter]",
    "steps=1,2",
    "steps=range(1,3)",
    "data=glob(*)",
    "model._partial_=false",
    "steps",
    "=",
]


def ask(app: ClientApp, overrides: str | None = None) -> Message:
    """Send a model and ask for a step, in a run with these overrides."""
    arrays = ArrayRecord(MODEL.state_dict())
    config = ConfigRecord({"step": 0, "momentum": 0.5})
    set_process_run(1)
    message = Message(
        RecordDict({"a": arrays, "c": config}), dst_node_id=2, message_type="train"
    )
    run_config: UserConfig = {} if overrides is None else {OVERRIDES: overrides}
    return app(message, Context(1, 2, {"partition-id": 0}, RecordDict(), run_config))


def test_choices_and_plain_values_pass() -> None:
    assert check_plain(HARMLESS) == HARMLESS
    assert check_plain("") == ""


@pytest.mark.parametrize("hostile", HOSTILE)
def test_anything_else_is_refused_before_it_is_composed(
    hostile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    composed: list[str] = []
    monkeypatch.setattr("simulations.app.compose_config", composed.append)
    for overrides in (hostile, f"steps=3 {hostile}"):
        with pytest.raises(ValueError, match="of the run"):
            check_plain(overrides)
    with pytest.raises(RefusedError, match="the log of this node says why"):
        ask(client_app, hostile)
    assert composed == []


@pytest.mark.parametrize("unknown", ["privacy.plan.seed=1", "nothing=1", "data.x=1"])
def test_keys_that_are_not_there_are_not_added(unknown: str) -> None:
    with pytest.raises(RefusedError, match="could not be made"):
        ask(client_app, unknown)


def test_who_runs_an_experiment_is_free_to_change_all_of_it() -> None:
    free = "+mine=1 aggregation._target_=my.Rule 'checkpoint=${oc.env:HOME}'"
    with pytest.raises(ValueError, match="of the run"):
        check_plain(free)
    assert ask(make_client_app(free)).has_content()

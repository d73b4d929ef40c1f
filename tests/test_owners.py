"""A client whose unit is the person, from its node's policy to its reply."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context

from flwr_safedshb.algorithm.answer_evaluation import PrivateEvaluation
from flwr_safedshb.algorithm.refusal import RefusedError
from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.privacy.accounting import accountant
from flwr_safedshb.privacy.ledger.ledger import Ledger
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.policy import NodePolicy, PolicyViolation
from flwr_safedshb.privacy.target import PrivacyTarget
from tests.clients import PLAN, THETA, data, ledger, make, node

# Twenty examples of eight persons.
OWNERS = [f"patient {i % 8}" for i in range(20)]
PERSONS = PrivacyPlan(1.0, 1.0, 2, 8, unit="person")
CONFIG = {"step": 0, "momentum": 0.5}


def make_by_owner(context: Context, **settings: object) -> SafeDSHBClient:
    return make(context, **{"plan": PERSONS, "owners": OWNERS, **settings})  # type: ignore[arg-type]


def test_a_step_is_charged_for_a_person(tmp_path: Path) -> None:
    client = make_by_owner(node(tmp_path, unit="person"))
    _, count, _ = client.fit([*THETA], {**CONFIG})
    assert count == 8
    spent = ledger(tmp_path).statement()
    assert spent.unit == "person"
    assert spent.epsilon == pytest.approx(replace(PERSONS).epsilon(1, 1e-5))
    assert "after 1 steps for a person (" in str(spent)


def test_a_node_decides_about_the_unit(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="unit=person refuses the run"):
        make(node(tmp_path / "a", unit="person"))
    with pytest.raises(RefusedError, match="'replace-one' is about one example"):
        make_by_owner(node(tmp_path / "b"))
    with pytest.raises(RefusedError, match="asks for a plan for one person"):
        make_by_owner(node(tmp_path / "c", unit="replace-one"))


@pytest.mark.parametrize(
    ("plan", "owners", "match"),
    [
        (PERSONS, None, "needs owners"),
        (PLAN, OWNERS, "unit='person'"),
        (
            replace(PERSONS, num_examples=20),
            OWNERS,
            "number of persons of the dataset, 8",
        ),
    ],
)
def test_owners_and_plan_go_together(
    plan: PrivacyPlan, owners: object, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        make(node(), plan=plan, owners=owners)


@pytest.mark.parametrize("per_owner", [0, 2.0, True, 10**6])
def test_max_per_owner_is_a_whole_number(per_owner: object) -> None:
    with pytest.raises(ValueError, match="max_per_owner"):
        make_by_owner(node(), max_per_owner=per_owner)


def test_a_policy_tells_persons_from_examples() -> None:
    persons = NodePolicy.from_config({"unit": "person"})
    persons.check(PERSONS)
    with pytest.raises(PolicyViolation, match=r"unit=person .* a plan for one example"):
        persons.check(replace(PERSONS, unit="example"))
    with pytest.raises(PolicyViolation, match=r"person-add-remove .* fixed batches"):
        NodePolicy.from_config({"unit": "person-add-remove"}).check(PERSONS)


def test_a_ledger_keeps_to_its_unit(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    book = Ledger(path, 5.0, 1e-5, unit="person-add-remove")
    poisson = replace(PERSONS, sampling="poisson")
    book.charge(poisson, 10)
    same = replace(poisson, unit="example", adjacency="add-remove").epsilon(10, 1e-5)
    assert book.epsilon() == pytest.approx(same)
    with pytest.raises(ValueError, match="is about one person"):
        book.charge(replace(poisson, unit="example"))
    assert Ledger(path).charges()[0].plan == poisson


def test_examples_and_persons_have_no_epsilon_in_common() -> None:
    with pytest.raises(ValueError, match="about one"):
        accountant.compute_epsilon([(PLAN, 1), (PERSONS, 1)], 1e-5)


def test_a_plan_for_persons_survives_json_and_older_plans_stay_as_they_were() -> None:
    assert PrivacyPlan.from_json(PERSONS.to_json()) == PERSONS
    assert "unit" not in PLAN.to_dict()


def test_a_target_for_persons_finds_their_noise() -> None:
    target = PrivacyTarget(3.0, 1e-5, 20, batch_size=2, unit="person")
    plan = make_by_owner(node(), plan=target).plan
    assert (plan.unit, plan.num_examples) == ("person", 8)
    assert plan.epsilon(20, 1e-5) <= 3.0


def test_held_out_persons_need_owners_beside_the_items() -> None:
    with pytest.raises(ValueError, match="needs owners as an array"):
        make_by_owner(
            node(),
            owners="patient",
            plan=replace(PERSONS, num_examples=6),
            evaluation=PrivateEvaluation(1.0, held_out=2),
        )


def test_held_out_persons_vote_and_do_not_train(tmp_path: Path) -> None:
    client = make_by_owner(
        node(tmp_path, unit="person"),
        plan=replace(PERSONS, num_examples=6),
        evaluation=PrivateEvaluation(
            1.0, held_out=2, right=lambda outputs, target: True
        ),
    )
    metrics = client.evaluate_privately(
        [*THETA],
        {"private-evaluation": 1, "max-loss": 2.0, "per-class": False, "session": "s"},
    )
    assert metrics["num-examples"] == 2
    client.fit([*THETA], {**CONFIG})
    plans = {
        charge.plan.part.partition(":")[0] for charge in ledger(tmp_path).charges()
    }
    assert plans == {"trained", "held-out"}
    inputs = data()[0]
    seen = []
    for part in (client.dataset, client.evaluator.dataset):  # type: ignore[union-attr]
        rows = [part.read_batch(np.arange(part.size), None, client.randomness)[0]]  # type: ignore[call-arg]
        tensor = torch.cat(rows)  # type: ignore[arg-type]
        found = {int((inputs == row).all(dim=1).nonzero()[0]) for row in tensor}
        seen.append({OWNERS[row] for row in found})
    assert len(seen[0]) == 6
    assert len(seen[1]) == 2
    assert not seen[0] & seen[1]

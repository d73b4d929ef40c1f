"""A node under odd messages and with odd examples; planted defects are seen."""

from collections.abc import Mapping

import numpy as np
import pytest

from flwr_safedshb.algorithm.refusal import RefusedError
from flwr_safedshb.algorithm.wire import Arrays
from flwr_safedshb.audit.messages import (
    BAD_EXAMPLES,
    odd_configs,
    send_odd_messages,
    send_to_bad_examples,
)
from flwr_safedshb.client import SafeDSHBClient, Scalar
from flwr_safedshb.privacy.batches import tensors_of

pytestmark = pytest.mark.federation

Fitted = tuple[Arrays, int, dict[str, Scalar]]


def test_a_node_withstands_odd_messages() -> None:
    found = send_odd_messages()
    assert found.broken == []
    assert found.count_results().keys() == {"answered", "refused"}
    assert min(found.count_results().values()) > 50


class Careless(SafeDSHBClient):
    """Looks at its examples before it knows whether it will answer."""

    def fit(self, parameters: Arrays, config: Mapping[str, Scalar]) -> Fitted:
        step = config.get("step")
        if not isinstance(step, int):
            example = self.dataset.read_one(0)
            assert example is not None
            raise RefusedError(f"no step for {float(tensors_of(*example)[0].sum())}")
        return super().fit(parameters, config)


class Unpaid(SafeDSHBClient):
    """Answers a message that it does not understand, and does not charge for it."""

    def fit(self, parameters: Arrays, config: Mapping[str, Scalar]) -> Fitted:
        if "step" not in config:
            return [np.zeros(2, np.float32)], 8, {}
        return super().fit(parameters, config)


class Overflowing(SafeDSHBClient):
    """Hands on what is not finite."""

    def fit(self, parameters: Arrays, config: Mapping[str, Scalar]) -> Fitted:
        momentum, count, metrics = super().fit(parameters, config)
        return [np.full(part.shape, np.inf) for part in momentum], count, metrics


@pytest.mark.parametrize(
    ("planted", "broken"),
    [
        (Careless, "for other examples"),
        (Unpaid, "not charged"),
        (Overflowing, "not finite"),
    ],
)
def test_planted_defects_show(planted: type[SafeDSHBClient], broken: str) -> None:
    cases = send_odd_messages(planted).broken
    assert any(broken in case.broken for case in cases)


class RepliesWithErrors(SafeDSHBClient):
    """Answers with an error where an example cannot be used."""

    def fit(self, parameters: Arrays, config: Mapping[str, Scalar]) -> Fitted:
        fitted = super().fit(parameters, config)
        for index in range(0, self.plan.num_examples, 1 + int(config["step"]) % 2):
            example = self.dataset.read_one(index)
            if example is None or int(tensors_of(*example)[1]) not in (0, 1):
                raise RefusedError("the step failed on an example")
        return fitted


def test_a_bad_example_changes_no_answer() -> None:
    found = send_to_bad_examples(3)
    assert found.broken == []
    assert found.count_results() == {"3 of 3 answered": len(BAD_EXAMPLES)}


def test_an_error_reply_on_bad_data_is_found() -> None:
    found = send_to_bad_examples(2, RepliesWithErrors)
    broken = {case.request for case in found.broken}
    assert {"a label out of range", "not a number", "nothing at all"} <= broken


def test_every_value_of_a_round_is_asked_oddly() -> None:
    requests = [name for name, _ in odd_configs()]
    assert len(requests) == len(set(requests)) > 120
    assert len(BAD_EXAMPLES) > 20

"""Settings as JSON values: equal for equal runs, and what differs is told."""

import json

from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.algorithm.run_identity import describe_differences, to_json


def test_settings_are_described_alike_in_every_process() -> None:
    class Own:
        def __init__(self, bound: float) -> None:
            self.bound = bound
            self.inner = SMEA()

    assert to_json(Own(1.0)) == to_json(Own(1.0))
    assert to_json(Own(1.0)) != to_json(Own(2.0))
    assert "0x" not in str(to_json([to_json, {"a": (Own, b"x")}]))
    assert json.dumps(to_json({"a": (1, b"x", SMEA())}))


def test_many_differences_are_counted_and_long_values_cut() -> None:
    then: dict[str, object] = {f"k{i}": i for i in range(9)}
    text = describe_differences(then, {"k0": "x" * 500})
    assert text.startswith("k0 was 0 and is 'xxx")
    assert text.endswith("; and 5 more")
    assert len(text) < 250
    assert describe_differences(then, dict(then)) == ""

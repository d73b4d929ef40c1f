"""How far a deployed run is, in words."""

import time
from pathlib import Path

import pytest

from simulations.loopback import watch as watches
from simulations.loopback.watch import LOG, Watch, report_rounds

LOGGED = """\
INFO :      Waiting for nodes: 2 connected, 4 needed
INFO :      [ROUND 1/20]
INFO :      \t> Node 7 is excluded: not-finite
INFO :      \t└──> Aggregated MetricRecord: {'replies': 3, 'skipped': 0}
INFO :      [ROUND 2/20]
INFO :      \t> Node 7 is excluded: not-finite
INFO :      \t> Node 8 is excluded: error
INFO :      \t└──> Aggregated MetricRecord: {'replies': 2, 'skipped': 0}
INFO :      [ROUND 3/20]
"""


def test_a_run_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    path = tmp_path / "run.log"
    watch = Watch(path)
    said = [watch.words()]
    for line in LOGGED.splitlines(keepends=True):
        with path.open("a") as file:
            file.write(line[:5])
        watch.words()
        with path.open("a") as file:
            file.write(line[5:])
        now[0] += 3.0
        said.append(watch.words())
    assert said[0] == "waiting"
    assert said[1] == "waiting for nodes: 2 connected, 4 needed"
    assert said[2] == "round 1 of 20"
    assert said[4] == (
        "round 1 of 20, 3 replies in the last one, nodes excluded so far: 1"
    )
    # Two rounds took 21 s: 18 are left.
    assert said[-1] == (
        "round 3 of 20, 2 replies in the last one, nodes excluded so far: 2, "
        "about 3 min left"
    )


@pytest.mark.parametrize(
    ("seconds", "words"), [(5, "5 s"), (89, "89 s"), (600, "10 min"), (7200, "2.0 h")]
)
def test_a_time_is_short_to_read(seconds: float, words: str) -> None:
    assert watches._time(seconds) == words


def test_only_who_listens_is_told() -> None:
    heard: list[str] = []
    with report_rounds(heard.append):
        LOG.info("round %d", 3)
    LOG.info("nobody")
    assert heard == ["round 3"]

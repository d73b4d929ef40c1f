"""The report: what it says, that it loads nothing, and that a browser can show it."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from simulations.engines import run
from simulations.results import record
from simulations.results.report import (
    label_runs,
    main,
    run_page,
    shares_left_out,
    write_joint_report,
)
from simulations.results.schema import RunRecord
from tests.guard import HANGS

pytestmark = pytest.mark.federation

SMALL = ["steps=6", "evaluate_every=2", "data.num_examples=800"]
WIDTHS = (390, 1280)


def recorded(*overrides: str) -> RunRecord:
    everything = [*SMALL, *overrides]
    return record.record(everything, run(everything), 1.5)


@pytest.fixture(scope="module")
def runs() -> list[RunRecord]:
    return [
        recorded("attack=huge-norm", "seed=1"),
        recorded("attack=huge-norm", "seed=2"),
        recorded("attack=non-finite", "seed=1"),
    ]


@pytest.fixture(scope="module")
def pages(
    runs: list[RunRecord], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("joint")
    write_joint_report(folder / "report.html", runs, "A <sweep>")
    return {"run": run_page(runs[0]), "sweep": (folder / "report.html").read_text()}


class Reader(HTMLParser):
    """Collects what a page would load, and checks that its tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "a":  # what a link leads to is not loaded
            self.loads += [v or "" for k, v in attrs if k in ("src", "href", "srcset")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", ["run", "sweep"])
def test_a_page_is_whole_and_loads_nothing(pages: dict[str, str], name: str) -> None:
    reader = Reader()
    reader.feed(pages[name])
    assert reader.open == []
    assert reader.loads
    assert all(load.startswith("data:image/svg+xml;base64,") for load in reader.loads)
    assert "url(" not in pages[name]
    assert "<script" not in pages[name]


def test_a_run_says_what_it_spent_and_that_its_noise_was_seeded(
    runs: list[RunRecord], pages: dict[str, str]
) -> None:
    epsilon = runs[0]["privacy"]["epsilon"]
    for words in (
        f"{epsilon:.4g}",
        "fixed-size sampling without replacement",
        "replace-one",
        "PLD accountant",
        "protects nobody",
        "noise_multiplier",
        "HugeNorm",
    ):
        assert words in pages["run"]


def test_excluded_replies_are_summed_over_runs(pages: dict[str, str]) -> None:
    assert "No reply was excluded" in pages["run"]
    assert "<span>not finite</span>" in pages["sweep"]
    assert "<span>18</span>" in pages["sweep"]


def test_text_is_escaped(pages: dict[str, str]) -> None:
    assert "A &lt;sweep&gt;" in pages["sweep"]
    assert "<sweep>" not in pages["sweep"]


def test_runs_are_labelled_by_the_overrides_in_which_they_differ(
    runs: list[RunRecord],
) -> None:
    found = label_runs(runs)
    sizes = {label: len(some) for label, some in found.by("attack").items()}
    assert sizes == {"huge-norm": 2, "non-finite": 1}
    assert found.seeds == [1, 2]


def test_shares_left_out(runs: list[RunRecord]) -> None:
    shares = shares_left_out(runs[:2])
    assert shares.shape == (7, 6)
    assert (shares[4:] == 1).all()
    assert (shares[:4] == 0).all()
    made_up: RunRecord = {
        **runs[0],
        "rounds": {**runs[0]["rounds"], "left_out": [[0], [], None, [0, 1], None, []]},
    }
    expected = np.zeros((7, 6))
    expected[0, [0, 3]] = expected[1, 3] = 1
    expected[:, [2, 4]] = np.nan
    np.testing.assert_array_equal(shares_left_out([made_up]), expected)


def test_the_command_writes_a_page(tmp_path: Path, runs: list[RunRecord]) -> None:
    paths = [tmp_path / f"{i}.json" for i in range(3)]
    for path, found in zip(paths, runs, strict=True):
        record.write(path, found)
    output = tmp_path / "report.html"
    main([str(paths[0]), "--output", str(output)])
    assert "one run" in output.read_text()
    main([*map(str, paths), "--output", str(output)])
    assert "several runs" in output.read_text()
    assert (tmp_path / "results.csv").read_text().count("\n") == 4
    with pytest.raises(SystemExit):
        main([str(output)])


# What a browser says of a page it has laid out, written into the page's title.
PROBE = """<script>addEventListener("load", () => {
  const images = [...document.images];
  document.title = "laid out: " + JSON.stringify({
    width: document.documentElement.scrollWidth <= innerWidth,
    images: images.every(i => i.complete && i.naturalWidth > 100 && i.width > 250)
  });
})</script></body>"""


@pytest.mark.process
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["run", "sweep"])
def test_a_browser_shows_it_without_scrolling_sideways(
    pages: dict[str, str], name: str, width: int, tmp_path: Path
) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser, "install chromium: reports are checked in a browser"
    # Headless windows have a least width, frames have none.
    inner = tmp_path / "page.html"
    # Opened, so that everything in it is laid out.
    opened = pages[name].replace("<details>", "<details open>")
    inner.write_text(opened.replace("</body>", PROBE))
    outer = tmp_path / "frame.html"
    outer.write_text(
        f'<iframe id="page" src="page.html" width="{width}" height="800"></iframe>'
        '<script>addEventListener("load", () => setTimeout(() => { document.title = '
        'document.getElementById("page").contentDocument.title }, 50))</script>'
    )
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--allow-file-access-from-files", "--virtual-time-budget=5000"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", outer.as_uri()]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=HANGS
    )
    found = re.search(r"<title>(.*)</title>", ran.stdout)
    assert found, ran.stdout[:1000] + ran.stderr[-1000:]
    assert found[1] == 'laid out: {"width":true,"images":true}'

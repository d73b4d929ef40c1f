"""The documentation: it builds without a warning, loads nothing, and its code runs."""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.guard import HANGS

ROOT = Path(__file__).parents[1]
PAGES = (
    *("quickstart", "persons", "privacy", "robustness", "red-teaming"),
    "experiments",
)
BLOCK = re.compile(r"```python\n(.*?)```", flags=re.DOTALL)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, built as `make docs` does: a broken link or anchor ends it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir"]
    ran = subprocess.run(
        [*command, str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return folder


class Loaded(HTMLParser):
    """What a page makes a browser fetch, as opposed to what it links to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag in ("script", "img", "iframe", "source"):
            self.found += [given["src"]] if "src" in given else []
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload"):
            self.found.append(given.get("href", ""))


@pytest.mark.process
def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.glob("*.html"))
    assert len(pages) >= 18
    for page in pages:
        loaded = Loaded()
        loaded.feed(page.read_text())
        assert loaded.found, page.name
        for address in loaded.found:
            assert "//" not in address, f"{page.name} loads {address}"
            if page.name != "404.html":
                assert (page.parent / address.partition("?")[0]).exists(), address
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", sheet.read_text()), sheet


@pytest.mark.process
def test_the_reference_has_every_public_name(site: Path) -> None:
    import flwr_safedshb

    text = (site / "api.html").read_text()
    anchors = re.findall(r'id="flwr_safedshb\.([\w.]+)"', text)
    documented = {anchor.rpartition(".")[2] for anchor in anchors}
    assert set(flwr_safedshb.__all__) <= documented


@pytest.mark.federation
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    names: dict[str, object] = {"__name__": page}
    for block in BLOCK.findall(text):
        exec(compile(block, f"{page}.md", "exec"), names)
    printed = capsys.readouterr().out
    # What a page says that its code prints.
    for output in re.findall(r"prints\n\n```text\n(.*?)\n```", text, flags=re.DOTALL):
        assert output in printed


def rendered(address: str, profile: Path) -> str:
    """Return a page as a browser shows it, after its scripts have run."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser, "install chromium: pages are checked in a browser"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--allow-file-access-from-files", "--virtual-time-budget=5000"]
    command += [f"--user-data-dir={profile / 'profile'}", address]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=HANGS
    )
    return ran.stdout


@pytest.mark.process
def test_the_search_box_finds_pages_opened_from_a_disk(
    site: Path, tmp_path: Path
) -> None:
    shown = rendered(f"{(site / 'index.html').as_uri()}?q=ledger", tmp_path)
    links = re.findall(r'href="([^"]*)" class="md-search-result__link"', shown)
    assert (site / "privacy.html").as_uri() + "#the-ledger" in links


WIDTH = """<iframe id="page" src="{page}" width="{width}" height="900"></iframe>
<script>addEventListener("load", () => setTimeout(() => {{
  const page = document.getElementById("page").contentDocument
  const wide = [...page.querySelectorAll("article *")].filter((e) =>
    !e.closest("pre, .md-typeset__scrollwrap, .highlight") &&
    e.getBoundingClientRect().right > {width} + 1)
  document.title = "laid out: " + wide.length + " " +
    page.documentElement.scrollWidth + " " + (wide[0]?.outerHTML ?? "").slice(0, 90)
}}, 300))</script>"""


@pytest.mark.process
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("page", ["index", "concepts", "privacy", "api"])
def test_no_page_is_wider_than_its_screen(
    site: Path, page: str, width: int, tmp_path: Path
) -> None:
    frame = site / f"frame-{page}-{width}.html"
    frame.write_text(WIDTH.format(page=f"{page}.html", width=width))
    shown = rendered(frame.as_uri(), tmp_path)
    frame.unlink()
    found = re.search(r"<title>laid out: (\d+) (\d+) (.*)</title>", shown)
    assert found, shown[:500]
    assert int(found[1]) == 0, found[3]
    assert int(found[2]) <= width

"""All benchmarks and one page: ``python -m simulations.benchmarks``.

Every benchmark has a process of its own. One that fails leaves the others alone, is
named on the page, and fails the command.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from simulations.benchmarks import history, html
from simulations.benchmarks.result import OUT, format_markdown
from simulations.benchmarks.thresholds import BENCHMARKS
from simulations.command import Parser, prepare_folder, print_settings_errors
from simulations.results.publish import check_page, publish

PAGE = "index.html"


def run_alone(name: str, out: Path, quick: bool) -> html.Section:
    """Run one benchmark in a new process, and read what it found."""
    command = [sys.executable, "-m", f"simulations.benchmarks.{name}"]
    command += ["--out", str(out), *(["--quick"] if quick else [])]
    path = out / f"{name}.json"
    picture = path.with_suffix(".png")
    for stale in (path, picture):  # of an earlier run
        stale.unlink(missing_ok=True)
    start = time.perf_counter()
    done = subprocess.run(command, check=False)
    seconds = time.perf_counter() - start
    if done.returncode or not path.exists():
        return html.Section(name, seconds, None, None)
    image = picture.read_bytes() if picture.exists() else None
    return html.Section(name, seconds, json.loads(path.read_text()), image)


@print_settings_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run all or some benchmarks, write the page, compare with the last record."""
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to see that all of it runs"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="directory")
    parser.add_argument(
        "--record", action="store_true", help=f"add the figures to {history.PATH.name}"
    )
    parser.add_argument(
        "--page", type=Path, help="put tables and pictures into this page, too"
    )
    options = parser.parse_args(arguments)
    names = options.names or list(BENCHMARKS)
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"{', '.join(unknown)}: the benchmarks are {list(BENCHMARKS)}")
    if options.record and (options.quick or options.names):
        parser.error("--record keeps whole runs: leave out --quick and names")
    if options.page is not None:
        if options.quick:
            parser.error("--page shows whole runs: leave out --quick")
        check_page(options.page, "benchmarks")
    prepare_folder(options.out)
    console = Console()
    sections = []
    for name in names:
        console.rule(name)
        sections.append(run_alone(name, options.out, options.quick))
    now = history.make_entry({s.name: s.costs for s in sections})
    # Small sizes have other costs under the same names.
    before = None if options.quick else history.load_last(now.machine)
    changes = history.compare_entries(before, now)
    if changes is not None:
        console.print(Markdown(format_markdown("History", [changes])))
    (options.out / PAGE).write_text(html.write_page(sections, now, changes))
    console.print(f"Written: {options.out / PAGE}", highlight=False)
    if failed := [section.name for section in sections if section.result is None]:
        sys.exit(f"failed: {', '.join(failed)}")
    if options.page is not None:
        pictures = {
            f"Benchmark {name}": path
            for name in names
            if (path := options.out / f"{name}.png").exists()
        }
        text = html.write_markdown(sections, now)
        publish(options.page, "benchmarks", text, pictures)
    if options.record:
        history.append_entry(now)
    return 0


if __name__ == "__main__":
    sys.exit(main())

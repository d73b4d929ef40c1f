"""Write the changes from each plain app to its private form, for the docs.

python examples/from-fedavg/diffs.py
"""

import difflib
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "diffs"
APPS, SIDES = ("torch", "older", "lora"), ("client", "server")


def diff(app: str, side: str) -> list[str]:
    """Return the changes of a file, as ``diff -U1`` shows them, without its head."""
    plain, private = (
        (HERE / app / form / f"{side}_app.py").read_text().splitlines()
        for form in ("plain", "private")
    )
    return list(difflib.unified_diff(plain, private, lineterm="", n=1))[2:]


def count_changes(lines: list[str]) -> tuple[int, int]:
    """Return how many lines are written, and how many are dropped."""
    kinds = [line[:1] for line in lines if line[1:].strip()]
    return kinds.count("+"), kinds.count("-")


def pages() -> Iterator[tuple[Path, str]]:
    """Yield the files of the docs and what belongs into them."""
    for app in APPS:
        for side in SIDES:
            lines = [line for line in diff(app, side) if line[:2] != "@@"]
            yield DOCS / f"{app}-{side}.diff", "\n".join(lines) + "\n"


if __name__ == "__main__":
    DOCS.mkdir(exist_ok=True)
    for path, text in pages():
        path.write_text(text)
    for app in APPS:
        for side in SIDES:
            written, dropped = count_changes(diff(app, side))
            print(f"{app} {side}: {written} lines written, {dropped} dropped")

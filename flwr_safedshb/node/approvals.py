"""Which apps a node runs: those whose bundles its owner has looked at.

A node runs the code that a run brings, and no floor or ledger holds against code. So
its owner lists the hashes of the bundles that may run (``approved-apps`` in the node's
config); any other is refused before it is unpacked.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Self

from flwr_safedshb.atomic_io import replace_file
from flwr_safedshb.sanitize import escape

KEY = "approved-apps"
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
# A bundle is at most 10 MB; what it unpacks to must be of that size too.
_MAX_BYTES = 64 * 2**20
# Names by which a text becomes code.
_RUNNERS = ("exec", "eval", "__import__", "compile")


@dataclass(frozen=True)
class Approvals:
    """The bundles that may run; None: operators are trusted with code."""

    hashes: frozenset[str] | None = None

    @classmethod
    def of(cls, words: object) -> Self:
        """Read the value of ``approved-apps``: hashes separated by commas or spaces."""
        if words is None:
            return cls(None)
        if not isinstance(words, str):
            raise ValueError(f"{KEY}={words!r} must be a text of hashes")
        hashes = frozenset(re.split(r"[,\s]+", words.strip())) - {""}
        for found in hashes:
            if not _HASH.fullmatch(found):
                raise ValueError(
                    f"{KEY} has {found!r}, which is no SHA-256 in lower-case "
                    "hexadecimal; `safedshb approve` writes them"
                )
        return cls(hashes)

    def words(self) -> str | None:
        """Return what `of` reads."""
        return None if self.hashes is None else ",".join(sorted(self.hashes))

    def allow(self, found: str) -> bool:
        """Say whether a bundle with this hash may run."""
        return self.hashes is None or found in self.hashes

    def refusal(self, found: str) -> str:
        """Return what the server is told."""
        return (
            f"this node's policy {KEY} refuses the run, whose app has the hash "
            f"{found}; its owner approves an app with `safedshb approve`"
        )


@dataclass(frozen=True)
class Contents:
    """What an app is: for the owner of a node to look at.

    Attributes
    ----------
    hash, name, version, publisher : str
    components : mapping
        Where the ServerApp and the ClientApp are.
    files : mapping of str to int
        Their sizes in bytes.
    imports : mapping of str to set of str
        The top-level modules that each Python file imports.
    """

    hash: str
    name: str
    version: str
    publisher: str
    components: Mapping[str, str]
    files: Mapping[str, int]
    imports: Mapping[str, frozenset[str]]


def contents(bundle: bytes) -> Contents:
    """Read a bundle without unpacking it or running anything of it.

    Raises
    ------
    ValueError
        If it is no bundle of a Flower app.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
            infos = [info for info in archive.infolist() if not info.is_dir()]
            if sum(info.file_size for info in infos) > _MAX_BYTES:
                raise ValueError(f"it unpacks to more than {_MAX_BYTES} bytes")
            texts = {info.filename: archive.read(info) for info in infos}
        project = tomllib.loads(texts["pyproject.toml"].decode())
        app = project["tool"]["flwr"]["app"]
        return Contents(
            hashlib.sha256(bundle).hexdigest(),
            str(project["project"]["name"]),
            str(project["project"]["version"]),
            str(app.get("publisher", "")),
            {key: str(value) for key, value in app["components"].items()},
            {name: len(text) for name, text in sorted(texts.items())},
            {
                name: _imported(text)
                for name, text in sorted(texts.items())
                if PurePosixPath(name).suffix == ".py"
            },
        )
    except (
        zipfile.BadZipFile,
        KeyError,
        TypeError,
        AttributeError,
        UnicodeDecodeError,
        tomllib.TOMLDecodeError,
        ValueError,
    ) as error:
        raise ValueError(f"this is no bundle of a Flower app: {error}") from error


def _imported(source: bytes) -> frozenset[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return frozenset({"(cannot be read)"})
    return frozenset(_names(tree))


def _names(tree: ast.AST) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).partition(".")[0]
        elif isinstance(node, ast.Name) and node.id in _RUNNERS:
            yield f"{node.id}()"


def write(path: Path, found: Contents) -> None:
    """Add a bundle to ``approved-apps`` of a node's file."""
    text = path.read_text()
    before = tomllib.loads(text)
    hashes = Approvals.of(before.get(KEY)).hashes or frozenset()
    words = ",".join(sorted({*hashes, found.hash}))
    line = f'{KEY} = "{words}"\n'
    if KEY in before:
        changed = re.sub(rf"(?m)^{KEY}[ \t]*=.*\n?", lambda _: line, text, count=1)
    else:
        # Before the first table: what follows one would belong to it.
        about = escape(f"# {found.publisher}/{found.name} {found.version}")
        more = f"{about}\n{line}"
        changed = re.sub(r"(?m)^(?=\[)|\Z", lambda _: more, text, count=1)
    try:
        kept = tomllib.loads(changed) == {**before, KEY: words}
    except tomllib.TOMLDecodeError:
        kept = False
    if not kept:
        raise ValueError(f"{path} cannot be added to; put {line.strip()!r} into it")
    replace_file(path, lambda file: file.write(changed.encode()))

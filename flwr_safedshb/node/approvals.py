"""Which apps a node runs: those whose bundles its owner has inspected.

A node runs the code that a run brings, and no policy or ledger holds against code. So
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
# Functions that run text as code.
_RUNNERS = ("exec", "eval", "__import__", "compile")


@dataclass(frozen=True)
class Approvals:
    """The hashes of bundles that may run; None: operators are trusted with code."""

    hashes: frozenset[str] | None = None

    @classmethod
    def parse(cls, value: object) -> Self:
        """Parse ``approved-apps``: hashes separated by commas or spaces, or None."""
        if value is None:
            return cls(None)
        if not isinstance(value, str):
            raise ValueError(f"{KEY}={value!r} must be a string of hashes")
        hashes = frozenset(re.split(r"[,\s]+", value.strip())) - {""}
        for each in hashes:
            if not _HASH.fullmatch(each):
                raise ValueError(
                    f"{KEY} has {each!r}, which is no SHA-256 in lower-case "
                    "hexadecimal; `safedshb approve` writes them"
                )
        return cls(hashes)

    def to_text(self) -> str | None:
        """Return what `parse` reads."""
        return None if self.hashes is None else ",".join(sorted(self.hashes))

    def find_refusal(self, bundle_hash: str) -> str | None:
        """Return what the server is told if a bundle may not run, else None."""
        if self.hashes is None or bundle_hash in self.hashes:
            return None
        return (
            f"this node's policy {KEY} refuses the run, whose app has the hash "
            f"{bundle_hash}; its owner approves an app with `safedshb approve`"
        )


@dataclass(frozen=True)
class AppContents:
    """What an app is, for the owner of a node to inspect.

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


def inspect_bundle(bundle: bytes) -> AppContents:
    """Inspect a bundle without unpacking it or running anything of it.

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
            infos.sort(key=lambda info: info.filename)
            files = {info.filename: archive.read(info) for info in infos}
        project = tomllib.loads(files["pyproject.toml"].decode())
        app = project["tool"]["flwr"]["app"]
        return AppContents(
            hashlib.sha256(bundle).hexdigest(),
            str(project["project"]["name"]),
            str(project["project"]["version"]),
            str(app.get("publisher", "")),
            {key: str(value) for key, value in app["components"].items()},
            {name: len(content) for name, content in files.items()},
            {
                name: _list_imports(content)
                for name, content in files.items()
                if PurePosixPath(name).suffix == ".py"
            },
        )
    except (
        zipfile.BadZipFile,
        KeyError,
        TypeError,
        AttributeError,
        ValueError,
    ) as error:
        raise ValueError(f"this is no bundle of a Flower app: {error}") from error


def _list_imports(source: bytes) -> frozenset[str]:
    try:
        return frozenset(_walk_imports(ast.parse(source)))
    except (SyntaxError, ValueError):
        return frozenset({"(cannot be read)"})


def _walk_imports(tree: ast.AST) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).partition(".")[0]
        elif isinstance(node, ast.Name) and node.id in _RUNNERS:
            yield f"{node.id}()"


def approve_in_file(path: Path, app: AppContents) -> None:
    """Add a bundle to ``approved-apps`` of a node's file."""
    text = path.read_text()
    before = tomllib.loads(text)
    hashes = Approvals.parse(before.get(KEY)).hashes or frozenset()
    value = ",".join(sorted({*hashes, app.hash}))
    line = f'{KEY} = "{value}"\n'
    if KEY in before:
        changed = re.sub(rf"(?m)^{KEY}[ \t]*=.*\n?", lambda _: line, text, count=1)
    else:
        # Before the first table: what follows one would belong to it.
        about = escape(f"# {app.publisher}/{app.name} {app.version}")
        added = f"{about}\n{line}"
        changed = re.sub(r"(?m)^(?=\[)|\Z", lambda _: added, text, count=1)
    try:
        is_kept = tomllib.loads(changed) == {**before, KEY: value}
    except tomllib.TOMLDecodeError:
        is_kept = False
    if not is_kept:
        raise ValueError(f"{path} cannot be added to; put {line.strip()!r} into it")
    replace_file(path, lambda file: file.write(changed.encode()))

"""Build what is released, and say what is in it: `make release`.

Into outputs/release: the wheel and the sdist, each built twice and compared to the
byte, and the wheel once more from the sdist; the pins of all that the base needs; an
SBOM of them (CycloneDX); and what pip-audit says of them, or that it could not ask.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "outputs" / "release"


def main() -> None:
    """Build, compare, list and audit."""
    changed = run("git", "status", "--porcelain")
    if changed:
        sys.exit(f"commit or remove these first:\n{changed}")
    # Files in an archive get the time of the commit, wherever it is built.
    os.environ["SOURCE_DATE_EPOCH"] = run("git", "log", "-1", "--format=%ct").strip()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    compare_builds()
    pins = OUTPUT / "requirements.txt"
    pins.write_text("".join(f"{name}=={v}\n" for name, v in find_pins().items()))
    write_sbom(pins)
    audit(pins)
    for path in sorted(OUTPUT.iterdir()):
        print(f"{hash_file(path)}  {path.relative_to(ROOT)}")


def run(*command: str, folder: Path = ROOT) -> str:
    """Run a command and return what it prints."""
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if ran.returncode:
        sys.exit(f"{' '.join(command)} fails:\n{ran.stdout}{ran.stderr}")
    return ran.stdout


def build(folder: Path, output: Path, *targets: str) -> dict[str, str]:
    """Build archives from a folder; return their hashes by name."""
    arguments = [word for target in targets for word in ("-t", target)]
    run(
        *(sys.executable, "-m", "hatchling", "build", "-d", str(output), *arguments),
        folder=folder,
    )
    return {path.name: hash_file(path) for path in output.iterdir()}


def compare_builds() -> None:
    """Build twice, from the checkout and from a copy elsewhere, and from the sdist."""
    with tempfile.TemporaryDirectory() as scratch:
        copy, again, last = (Path(scratch) / name for name in ("copy", "again", "last"))
        run("git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(copy))
        first = build(ROOT, OUTPUT, "wheel", "sdist")
        if build(copy, again, "wheel", "sdist") != first:
            sys.exit(f"two builds of one commit differ: {first}")
        (sdist,) = OUTPUT.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch, filter="data")
        unpacked = Path(scratch) / sdist.name.removesuffix(".tar.gz")
        for name, digest in build(unpacked, last, "wheel").items():
            if first[name] != digest:
                sys.exit(f"{name} built from the sdist differs")
    print("wheel and sdist: the same bytes from two folders, and from the sdist")


def find_pins() -> dict[str, str]:
    """Return the tested version of each package that the base needs."""
    from importlib import metadata

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [(Requirement(text), "") for text in project["dependencies"]]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (re.split(r"==|[ ;]", line) for line in lines if "==" in line)
    pins = {plain(name): version for name, version, *_ in pairs}
    seen: set[tuple[str, str]] = set()
    while waiting:
        needed, of = waiting.pop()
        name, marker = plain(needed.name), needed.marker
        if name not in pins or (marker and not marker.evaluate({"extra": of})):
            continue
        for extra in {"", *needed.extras} - {e for n, e in seen if n == name}:
            seen.add((name, extra))
            texts = metadata.requires(name) or ()
            waiting += [(Requirement(text), extra) for text in texts]
    return {name: pins[name] for name in sorted({name for name, _ in seen})}


def write_sbom(pins: Path) -> None:
    """Write the bill of materials of the base."""
    sbom = OUTPUT / "sbom.cdx.json"
    run(
        *(tool("cyclonedx-py"), "requirements", "--output-reproducible"),
        *("--pyproject", "pyproject.toml", "--mc-type", "library"),
        *("-o", str(sbom), str(pins)),
    )
    count = len(json.loads(sbom.read_text())["components"])
    print(f"SBOM: {count} packages in {sbom.relative_to(ROOT)}")


def audit(pins: Path) -> None:
    """Ask for known vulnerabilities; say so where nobody answers."""
    command = [tool("pip-audit"), "-r", str(pins), "--no-deps", "--disable-pip"]
    ran = subprocess.run([*command, "-f", "json"], capture_output=True, text=True)
    try:
        found = json.loads(ran.stdout)["dependencies"]
    except (ValueError, KeyError):
        print("audit: NOT DONE, pip-audit has no answer from an index of advisories")
        return
    asked = [one for one in found if "skip_reason" not in one]
    bad = [one["name"] for one in asked if one["vulns"]]
    if not asked:
        print("audit: NOT DONE, no index of advisories knows any of the packages")
    elif bad:
        sys.exit(f"audit: known vulnerabilities in {', '.join(bad)}")
    else:
        print(f"audit: nothing is known of {len(asked)} of {len(found)} packages")


def tool(name: str) -> str:
    """Return the path of a program beside this Python's folder of release tools."""
    return str(ROOT / ".venv" / "release" / "bin" / name)


def plain(name: str) -> str:
    """Return a package's normalized name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()

"""Draw SMEA's worked example: ``python -m simulations.studies.pruning``.

Seven points, of which two may be hostile, and what each prune of the search says of
them; `flwr_safedshb.aggregation.smea.example` has the same in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Ellipse

from flwr_safedshb.aggregation.smea.example import (
    KNOWN,
    POINTS,
    F,
    derive_conclusions,
    improvement_threshold,
    top_eigenvalue,
)
from simulations.command import Parser, prepare_picture, print_settings_errors

PICTURE = Path("docs/images/smea.png")
ANCHOR = 0
_IN, _OUT, _OPEN, _ANCHOR = "#009e73", "#d55e00", "#9aa5ad", "#0072b2"


def picture() -> Figure:
    """Draw a panel for the set that is known, and one for each conclusion."""
    t = improvement_threshold(KNOWN)
    found = {one.prune: one for one in derive_conclusions(POINTS, F, ANCHOR, t)}
    figure = Figure(figsize=(14, 4.4), layout="constrained")
    axes = figure.subplots(1, 4)
    _show(axes[0], f"1. Five are known: t = {t:.1f}", inside=KNOWN)
    _spread(axes[0], KNOWN)

    far = found["far"].out
    _show(axes[1], f"2. Too far from {ANCHOR}: {far[0]} is out", far)
    radius = float(np.sqrt(2 * t))
    axes[1].add_patch(Circle(POINTS[ANCHOR], radius, fill=False, ls="--", ec=_OUT))
    axes[1].text(-0.6, -2.6, f"radius sqrt(2t) = {radius:.1f}", color=_OUT)

    (pair,) = found["pairs"].pairs
    _show(axes[2], f"3. At most one of {pair[0]} and {pair[1]}", far)
    axes[2].plot(*POINTS[list(pair)].T, color=_OUT, ls=":", lw=2, zorder=1)
    axes[2].text(0.0, 0.5, "the 2 x 2 minor\nof M is negative", color=_OUT)

    best = found["found"]
    stay, out = found["inertia"].in_, (*far, *best.out)
    value = top_eigenvalue(POINTS[list(best.in_)])
    title = f"4. {stay} stay, so {best.out[0]} goes: value {value:.1f}"
    _show(axes[3], title.replace("(", "").replace(")", ""), out, best.in_)
    _spread(axes[3], best.in_)
    return figure


def _show(
    axes: Axes, title: str, out: Sequence[int] = (), inside: Sequence[int] = ()
) -> None:
    for i, place in enumerate(POINTS):
        colour = _OUT if i in out else _IN if i in inside else _OPEN
        axes.plot(*place, marker="X" if i in out else "o", ms=13, color=colour)
        axes.annotate(str(i), place, (8, 8), textcoords="offset points")
    axes.plot(*POINTS[ANCHOR], marker="o", ms=19, mfc="none", mec=_ANCHOR, mew=2)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlim(-1.0, 11.0)
    axes.set_ylim(-3.2, 11.2)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([])


def _spread(axes: Axes, chosen: Sequence[int]) -> None:
    """Draw the ellipse of a set's scatter; its long half-axis is sqrt(value)."""
    points = POINTS[list(chosen)]
    centred = points - points.mean(axis=0)
    values, vectors = np.linalg.eigh(centred.T @ centred)
    angle = float(np.degrees(np.arctan2(vectors[1, 1], vectors[0, 1])))
    width, height = 2 * np.sqrt(values[1]), 2 * np.sqrt(values[0])
    place = tuple(points.mean(axis=0))
    axes.add_patch(Ellipse(place, width, height, angle=angle, fill=False, ec=_IN))


@print_settings_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Draw the picture into a file."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PICTURE)
    args = parser.parse_args(argv)
    prepare_picture(args.out)
    picture().savefig(args.out, dpi=110)
    print(f"picture: {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Two facts about spread, measured: ``python -m simulations.studies.spread``.

h clients send the same vector plus Gaussian noise. What does the noise add to the top
eigenvalue of their covariance, which SMEA's bound is in, and what to its trace, which
the bounds of the median, Krum and others are in? The rank of a covariance of h points,
h - 1, decides: beside it the dimension hardly counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flwr_safedshb.theory import heterogeneity, noise_spread
from simulations.command import Parser, at_least, complaining, prepare_picture
from simulations.results.plots import LOOKS, PANEL, STYLE

CLIENTS = (4, 16, 64)
DIMENSIONS = (1, 3, 10, 30, 69, 100, 300, 1000, 3000, 10000)
SHOWN = (1, 10, 69, 1000)


def spreads(h: int, d: int, draws: int, seed: int = 0) -> tuple[float, float, float]:
    """Return means over draws of trace, lambda_max and their ratio; noise has std 1."""
    rng = np.random.default_rng([seed, h, d])
    found = []
    for _ in range(draws):
        total, top = heterogeneity(rng.normal(size=(h, d)))
        found.append((total**2, top**2, (total / top) ** 2))
    trace, lambda_max, ratio = np.mean(found, axis=0)
    return float(trace), float(lambda_max), float(ratio)


def table(draws: int) -> str:
    """Return measured and predicted figures as a table."""
    lines = [
        "| clients h | d | trace | d (1 - 1/h) | top eigenvalue | at most "
        "(1 + √(d/h))² | trace / top eigenvalue | at most min(d, h-1) |",
        "|" + "---|" * 8,
    ]
    for h in CLIENTS:
        for d in SHOWN:
            trace, top, ratio = spreads(h, d, draws)
            exact, bound = noise_spread(h, d, 1.0)
            figures = (trace, exact, top, bound, ratio, min(d, h - 1))
            cells = [f"{h}", f"{d}", *(f"{figure:.3g}" for figure in figures)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(draws: int) -> Figure:
    """Draw both spreads, and their ratio, against the dimension."""
    with style.context(STYLE):
        drawn = Figure(figsize=(2 * PANEL[0], PANEL[1] * 1.15), layout="constrained")
        left, right = drawn.subplots(1, 2)
        every = np.array(DIMENSIONS)
        for look, h in zip(LOOKS[1:], CLIENTS, strict=False):
            found = np.array([spreads(h, d, draws) for d in DIMENSIONS])
            bounds = [noise_spread(h, d, 1.0)[1] for d in DIMENSIONS]
            marked = {"color": look.colour, "marker": look.marker, "markersize": 4}
            left.plot(every, found[:, 1], ls="", label=f"h = {h}", **marked)
            left.plot(every, bounds, look.line, color=look.colour, lw=1)
            right.plot(every, found[:, 2], ls="", label=f"h = {h}", **marked)
            most = np.minimum(every, h - 1)
            right.plot(every, most, look.line, color=look.colour, lw=1)
        left.plot(every, every, "--", color="0.4", lw=1, label="trace, about d")
        left.axhline(1.0, color="0.4", ls=":", lw=1, label="1, were it added once")
        right.plot(every, every, "--", color="0.4", lw=1, label="d")
        _finish(left, "top eigenvalue of noise (lines: (1 + √(d/h))²)", (0.3, 2e4))
        _finish(right, "trace over top eigenvalue (lines: min(d, h-1))", (0.7, 300))
    return drawn


def _finish(axes: Axes, title: str, limits: tuple[float, float]) -> None:
    axes.set(xscale="log", yscale="log", xlabel="dimension d", ylim=limits)
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)


@complaining
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the picture."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--draws", type=at_least(1), default=200, help="of noise, for a figure"
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/spread.png"))
    options = parser.parse_args(arguments)
    prepare_picture(options.out)
    print(table(options.draws))
    figure(options.draws).savefig(options.out, dpi=110)
    print(f"Written: {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

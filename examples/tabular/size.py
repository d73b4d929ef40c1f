"""Say beforehand how wide the interval of a sensitivity will be: python size.py.

A node with r rare rows among those it holds out answers with noise of the standard
deviation s sqrt(5). The server's interval for the median node allows for z such
deviations in the count of the rare rows, and for sqrt(1.25) z in that of the right.
"""

import argparse
import math
from statistics import NormalDist

from flwr_safedshb import PrivacyTarget


def forecast_interval(
    rare: int, truth: float, target: PrivacyTarget, held_out: int, honest: int
) -> tuple[float, float]:
    """Return the likely interval of a node whose sensitivity is `truth`."""
    noise = target.make_plan(held_out).noise_multiplier * math.sqrt(5.0)
    reach = NormalDist().inv_cdf(1.0 - 0.05 / (4 * honest)) * noise
    wider = math.sqrt(1.25) * reach
    low = max(truth * rare - wider, 0.0) / (rare + reach)
    return low, min((truth * rare + wider) / max(rare - reach, 1e-9), 1.0)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--sites", type=int, default=6)
    parser.add_argument("--hostile", type=int, default=1)
    parser.add_argument("--prevalence", type=float, default=0.14)
    given = parser.parse_args()
    target = PrivacyTarget(given.epsilon, given.delta, 1, sampling="whole")
    print("held-out rows  rare ones  interval, if the sensitivity is 0.80")
    for held_out in (200, 500, 1000, 2000, 5000):
        rare = round(given.prevalence * held_out)
        honest = given.sites - given.hostile
        low, high = forecast_interval(rare, 0.8, target, held_out, honest)
        print(f"{held_out:13}  {rare:9}  {low:.2f} to {high:.2f}")


if __name__ == "__main__":
    main()

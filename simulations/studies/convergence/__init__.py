"""The convergence theorem, measured: regularised logistic regression, its schedule.

Algorithm 1 in a few lines around the project's own rules, attacks, plans and schedules:
many steps of many seeds in seconds. Inputs have norm 1 and C is 1, so that clipping
does nothing, as the theorem assumes. The noise of a step is fixed and T grows, as in
the theorem; epsilon grows with T, and is stated.
"""

from simulations.studies.convergence.study import ConvergenceCheck

__all__ = ["ConvergenceCheck"]

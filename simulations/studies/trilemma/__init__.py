"""Private robust mean estimation, measured: the setting of the paper's lower bound.

Honest clients hold m points of the unit ball and release their mean once, with the
noise that the accountant asks for; the loss is half the squared distance, so that one
step of Safe-DSHB from zero is the whole of it. Adversaries answer, a rule aggregates,
and the squared distance to the honest clients' own mean is the error.
"""

from simulations.studies.trilemma.study import EmpiricalTrilemma, Sweep

__all__ = ["EmpiricalTrilemma", "Sweep"]

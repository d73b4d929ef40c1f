"""Every rule and attack that there is, so that no test has to be told of a new one."""

import importlib
import inspect
import pkgutil

from flwr_safedshb import aggregation
from flwr_safedshb.aggregation import (
    NNM,
    SMEA,
    Average,
    Filter,
    Krum,
    Median,
    Rule,
    TrimmedMean,
)
from tests.configured import configured

# More settings of what is found below.
VARIANTS: tuple[Rule, ...] = (
    Filter(min_mass=0.0),
    Filter(spectral_bound=2.0),
    NNM(Average()),
    NNM(Krum()),
    NNM(Median()),
    NNM(TrimmedMean()),
)


def all_rules() -> list[Rule]:
    """Return a rule of each class of the package, variants, and what conf/ makes."""
    for module in pkgutil.walk_packages(
        aggregation.__path__, f"{aggregation.__name__}."
    ):
        importlib.import_module(module.name)
    kinds = _concrete(Rule)  # type: ignore[type-abstract]
    rules = [*map(_made, sorted(kinds, key=lambda kind: kind.__name__))]
    rules += [*VARIANTS, *(r for r in configured("aggregation") if isinstance(r, Rule))]
    return list({str(rule): rule for rule in rules}.values())


def _concrete(kind: type[Rule]) -> set[type[Rule]]:
    """Return the subclasses that the package defines and that can be made."""
    below = {kind for child in kind.__subclasses__() for kind in _concrete(child)}
    inside = kind.__module__.startswith(f"{aggregation.__name__}.")
    return below | ({kind} if inside and not inspect.isabstract(kind) else set())


def _made(kind: type[Rule]) -> Rule:
    """Return a rule of a class, with SMEA where it needs another rule."""
    settings = inspect.signature(kind).parameters.values()
    needed = [one.name for one in settings if one.default is one.empty]
    return kind(**dict.fromkeys(needed, SMEA()))

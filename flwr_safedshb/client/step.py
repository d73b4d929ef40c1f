"""One step of Algorithm 1 for one client, or for several of one process at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from logging import ERROR
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np
from flwr.supercore import log
from numpy.typing import NDArray

from flwr_safedshb.client.node import RefusedError
from flwr_safedshb.client.prepared import Prepared
from flwr_safedshb.privacy.clipping.checks import UnsupportedModelError
from flwr_safedshb.privacy.gaussian import (
    Draw,
    PrivateDataError,
    Vector,
    private_gradients,
)
from flwr_safedshb.privacy.ledger.ledger import BudgetExhausted, LedgerError

P = ParamSpec("P")
T = TypeVar("T")
Arrays = list[NDArray[np.generic]]
Scalar = bool | bytes | float | int | str


@dataclass(frozen=True)
class Step:
    """What is asked: t, beta, the run, and whether the server may come back to it."""

    number: int
    momentum: float
    session: str
    anchor: bool


class Trainer(Protocol):
    """A client that takes steps; `SafeDSHBClient` is one."""

    prepared: Prepared
    weight_decay: float

    def begin(self, parameters: Arrays, config: Mapping[str, Scalar]) -> Step:
        """Check what is asked, and charge the ledger for it."""
        ...

    def draw(self, step: Step) -> Draw:
        """Return what the private gradient of a step is made of."""
        ...

    def finish(self, step: Step, gradient: Vector) -> Arrays:
        """Update the momentum with a private gradient, keep it, return it."""
        ...


class Ask(NamedTuple):
    """One step asked of one client."""

    client: Trainer
    parameters: Arrays
    config: Mapping[str, Scalar]


def fit_together(asks: Sequence[Ask]) -> list[Arrays | RefusedError]:
    """Take one step with each of several clients of this process.

    Those who were sent the same arrays, in one list, for the same prepared model go
    through it together. What one refuses is no matter to the others.

    Returns
    -------
    list of (m_t in float32, or RefusedError)
    """
    results: list[Arrays | RefusedError | None] = [None] * len(asks)
    groups: dict[tuple[int, int, float], list[tuple[int, Step]]] = {}
    for i, (client, parameters, config) in enumerate(asks):
        step = _guarded(client.begin, parameters, config)
        if isinstance(step, RefusedError):
            results[i] = step
        else:
            key = (id(client.prepared), id(parameters), client.weight_decay)
            groups.setdefault(key, []).append((i, step))
    for group in groups.values():
        for (i, step), gradient in zip(group, _gradients(asks, group), strict=True):
            results[i] = (
                gradient
                if isinstance(gradient, RefusedError)
                else _guarded(asks[i].client.finish, step, gradient)
            )
    return [result for result in results if result is not None]


def _gradients(
    asks: Sequence[Ask], group: list[tuple[int, Step]]
) -> list[Vector | RefusedError]:
    """Return the private gradients of a group; where that fails, of each alone."""
    client, parameters, _ = asks[group[0][0]]
    prepared = client.prepared

    def compute(some: list[tuple[int, Step]]) -> list[Vector]:
        prepared.load(parameters)
        draws = [asks[i].client.draw(step) for i, step in some]
        return private_gradients(prepared.gradients, draws, client.weight_decay)

    together = _guarded(compute, group)
    if not isinstance(together, RefusedError):
        return [*together]
    alone: list[list[Vector] | RefusedError] = [together]
    if len(group) > 1:
        alone = [_guarded(compute, [one]) for one in group]
    return [one if isinstance(one, RefusedError) else one[0] for one in alone]


def _guarded(
    function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T | RefusedError:
    """Return what a function returns, or why the client refuses: no text of others."""
    try:
        return function(*args, **kwargs)
    except RefusedError as error:
        return error
    except BudgetExhausted:
        refusal = "the privacy budget of this node is spent; nothing was released"
    except LedgerError as error:
        log(ERROR, "%s", error)
        refusal = "the privacy ledger of this node cannot be used"
    except (PrivateDataError, UnsupportedModelError) as error:
        refusal = str(error)
    except Exception as error:
        log(ERROR, "The step failed", exc_info=error)
        refusal = "the step failed; the log of this node says why"
    # Outside the handlers, so that no cause is attached.
    return RefusedError(refusal)

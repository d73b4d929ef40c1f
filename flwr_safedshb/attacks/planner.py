"""Plan which way to push in every round, for the loss of the model that a run returns.

Whoever looks one step ahead pushes against the gradient at the model of the step. With
momentum and a long rate the model swings, and such pushes cancel. Colluders who know
the rates of the server and the clip of the clients, which are public, and who hold
examples of their own can do better: they train on from the model of the round as they
expect the honest clients to, and follow the loss at the end back to the push of now.
That is the adjoint method of optimal control: with theta_{k+1} = theta_k - gamma (m_k +
e_k) and m_{k+1} = beta m_k + (1 - beta) g(theta_{k+1}), the gradient of the last loss
with respect to every push e_k takes one pass forward and one back.

The result goes to `AdversarialGrid` in the place of the gradient of the loss:
``AdversarialGrid(grid, Strongest(), 3, SMEA(), gradient=PushPlanner(...))``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.aggregation.rule import FloatArray

# Maps a model, (d,), to a gradient there, (d,).
VectorField = Callable[[FloatArray], FloatArray]
# How far a model moves, in its own norm or in 1, to see how the gradient changes.
_MOVE = 1e-2


class PushPlanner:
    """The gradient of the returned model's loss with respect to this round's push.

    A callable of the arrays of a round's model, to be called once a round. It keeps
    the plan of one run: make another for the next.

    Parameters
    ----------
    client_gradient : callable, (d,) -> (d,)
        What honest clients are expected to compute at a model, clipped as they clip.
    loss_gradient : callable, (d,) -> (d,)
        Of the loss that is to grow.
    rates : callable, int -> (float, float)
        Learning rate of the server and momentum of the clients in a round, from 0 on;
        such as ``SafeDSHB(...).settings.rates_in_round``.
    num_rounds : int
        T.
    output : "last" or "average"
        Which model the server returns; the average is that of the last half.
    horizon : int
        How many rounds are looked ahead at most.
    num_plans : int
        How often in a run the plan is made anew, which takes 2 ``horizon`` gradients.
    """

    def __init__(
        self,
        client_gradient: VectorField,
        loss_gradient: VectorField,
        rates: Callable[[int], tuple[float, float]],
        num_rounds: int,
        output: Literal["last", "average"] = "last",
        horizon: int = 100,
        num_plans: int = 60,
    ) -> None:
        whole = {"num_rounds": num_rounds, "horizon": horizon, "num_plans": num_plans}
        for name, value in whole.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if output not in ("last", "average"):
            raise ValueError(f"output={output!r} must be last or average")
        self._client_gradient, self._loss_gradient = client_gradient, loss_gradient
        self._rates, self._num_rounds, self._output = rates, num_rounds, output
        self._horizon, self._every = horizon, -(-num_rounds // num_plans)
        self._round = 0
        # What an honest client without noise would send, and the model before.
        self._momentum: FloatArray = np.zeros(1)
        self._before: FloatArray | None = None
        # By round, the unit vector against which the colluders push; and how far the
        # rule let the last push go.
        self._ways: dict[int, FloatArray] = {}
        self._reach = 0.0
        # Of the models so far that the average contains.
        self._total: FloatArray = np.zeros(1)
        self._count = 0

    def __call__(self, arrays: Sequence[NDArray[np.generic]]) -> FloatArray:
        """Return the unit vector, (d,), to push against in this round.

        Parameters
        ----------
        arrays : sequence of ndarray
            The model that the server sent in this round.
        """
        model = np.concatenate([array.reshape(-1) for array in arrays])
        model = model.astype(np.float64)
        now = self._round
        if self._before is not None:
            rate = self._rates(now - 1)[0]
            pushed = (self._before - model) / rate - self._momentum
            # Along the plan, where the clients' noise hardly counts.
            self._reach = max(0.0, -float(pushed @ self._ways[now - 1]))
        if self._is_returned(now):
            self._total, self._count = self._total + model, self._count + 1
        gradient, beta = self._client_gradient(model), self._rates(now)[1]
        self._momentum = _update(self._momentum, gradient, beta)
        self._before = model
        if now % self._every == 0 or now not in self._ways:
            self._plan(model)
        self._round += 1
        return self._ways[now]

    def _is_returned(self, number: int) -> bool:
        """Return whether the average contains the model after so many rounds."""
        return number > self._num_rounds // 2

    def _plan(self, model: FloatArray) -> None:
        """Train on from a model under the plan so far, and improve the plan."""
        now = self._round
        rounds = range(now, max(now + 1, min(now + self._horizon, self._num_rounds)))
        momentum, way = self._momentum, None
        models, gradients = [], []
        for k in rounds:
            way = self._ways.get(k, way)
            gamma = self._rates(k)[0]
            push = 0.0 if way is None else -self._reach * way
            model = model - gamma * (momentum + push)
            gradient = self._client_gradient(model)
            momentum = _update(momentum, gradient, self._rates(k + 1)[1])
            models.append(model)
            gradients.append(gradient)
        to_model, to_momentum = np.zeros_like(model), np.zeros_like(model)
        losses = self._differentiate_loss(models)
        for k in reversed(rounds):
            i = k - now
            to_model = to_model + losses.get(i, 0.0)
            beta = self._rates(k + 1)[1]
            moved = self._differentiate_gradient(models[i], gradients[i], to_momentum)
            to_model = to_model + (1.0 - beta) * moved
            length = np.linalg.norm(to_model)
            self._ways[k] = to_model / (length or 1.0)
            to_momentum = beta * to_momentum - self._rates(k)[0] * to_model

    def _differentiate_loss(
        self, models: Sequence[FloatArray]
    ) -> dict[int, FloatArray]:
        """Return the gradient of the loss with respect to the models that count."""
        last = len(models) - 1
        if self._output == "last":
            return {last: self._loss_gradient(models[last])}
        counted = [
            i for i in range(len(models)) if self._is_returned(self._round + i + 1)
        ] or [last]
        count = self._count + len(counted)
        average = (self._total + np.sum([models[i] for i in counted], axis=0)) / count
        share = self._loss_gradient(average) / count
        return dict.fromkeys(counted, share)

    def _differentiate_gradient(
        self, model: FloatArray, gradient: FloatArray, way: FloatArray
    ) -> FloatArray:
        """Return how much the clients' gradient changes along a way, by a difference.

        It stands for the transpose too: both are the Hessian where nothing is clipped.
        """
        length = float(np.linalg.norm(way))
        if not length:
            return way
        move = _MOVE * max(1.0, float(np.linalg.norm(model))) / length
        changed: FloatArray = (
            self._client_gradient(model + move * way) - gradient
        ) / move
        return changed


def _update(momentum: FloatArray, gradient: FloatArray, beta: float) -> FloatArray:
    """Return the next momentum; the first is (1,), of zero."""
    return np.asarray(beta * momentum + (1.0 - beta) * gradient)

"""The client's half of Safe-DSHB (Algorithm 1, lines 4 to 7), for every engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import nn

from flwr_safedshb.algorithm.budget import PrivacyBudget
from flwr_safedshb.algorithm.model_arrays import load_weights
from flwr_safedshb.algorithm.momentum_store import MomentumState, MomentumStore
from flwr_safedshb.algorithm.requests import TrainRequest
from flwr_safedshb.algorithm.wire import Arrays, sgd_step, split_vector
from flwr_safedshb.privacy.bad_examples import log_causes
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.owners import PrivateData
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.private_gradient import (
    BLOCK,
    BatchSource,
    Vector,
    private_vector,
)
from flwr_safedshb.privacy.randomness.noise import Randomness


@dataclass(frozen=True)
class GradientRequest:
    """The private gradient that a training step waits for.

    Attributes
    ----------
    step : int
        t; seeded randomness depends on it.
    weights : list of arrays
        theta_t.
    """

    step: int
    weights: Arrays


def training_step(
    request: TrainRequest, weights: Arrays, budget: PrivacyBudget, store: MomentumStore
) -> Generator[GradientRequest, Vector, Vector]:
    """Charge the budget, take K private steps, save the momentum and return the reply.

    Yields a `GradientRequest` wherever a private gradient is needed and expects that
    gradient, (d,), in return. Engines differ only in how they compute it: alone, for
    many clients in one batch, or in a worker process. The privacy guarantee depends on
    the order below, so all engines share this function.

    Parameters
    ----------
    request : TrainRequest
    weights : list of arrays
        theta_t, with d entries in all.
    budget : PrivacyBudget
    store : MomentumStore

    Returns
    -------
    ndarray of shape (d,), float32
        m_t, or the mean of the K momentums.
    """
    hashed = ""
    if store.keeps_answers:
        hashed = _hash_request(request, weights, budget.plan)
    answer = store.find_answer(request.session, request.last_step, hashed)
    if answer is not None:  # a restarted server asks again: charged for already
        return answer
    past = store.load(
        request.session, request.step, sum(array.size for array in weights)
    )
    budget.charge_training(request)  # on disk before any data is read
    momentum = past.momentum
    total: NDArray[np.float64] | None = None
    for step in range(request.step, request.last_step + 1):
        # Lines 4 to 6: draw a batch, clip each gradient, average, add noise.
        gradient = yield GradientRequest(step, weights)
        momentum = update_momentum(momentum, gradient, request.momentum)  # line 7
        if request.local_steps > 1:
            total = momentum.astype(np.float64) if total is None else total + momentum
            shapes = [array.shape for array in weights]
            pairs = zip(weights, split_vector(momentum, shapes), strict=True)
            weights = [sgd_step(*pair, request.learning_rate) for pair in pairs]
    anchor = past.step if request.checkpointed else past.anchor
    # With local steps the reply is a mean, which is not stored.
    answers = hashed if total is None else ""
    state = MomentumState(request.last_step, momentum, anchor, answers)
    store.save(request.session, state)
    return momentum if total is None else (total / request.local_steps).astype("f4")


def _hash_request(request: TrainRequest, weights: Arrays, plan: PrivacyPlan) -> str:
    """Return a hash of all that a reply depends on, beside data and chance."""
    about = [request.step, request.momentum, request.local_steps, repr(plan)]
    digest = hashlib.sha256(json.dumps(about).encode())
    for array in weights:
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def resume_step(
    steps: Generator[GradientRequest, Vector, object], found: Vector | BaseException
) -> GradientRequest:
    """Send a gradient into a training step, or the error that came instead of it.

    Returns
    -------
    GradientRequest
        The next gradient that the step waits for.

    Raises
    ------
    StopIteration
        At the end of the step, with its result as ``value``.
    """
    if isinstance(found, GeneratorExit):  # it would end the generator silently
        found = RuntimeError("the gradient was given up")
    return steps.throw(found) if isinstance(found, BaseException) else steps.send(found)


def update_momentum(momentum: Vector, gradient: Vector, beta: float) -> Vector:
    """Return m_t = beta m_{t-1} + (1 - beta) g_t, written over the gradient.

    Parameters
    ----------
    momentum : ndarray of shape (d,) or (1,)
        m_{t-1}; (1,) for the zero that a run starts from.
    gradient : ndarray of shape (d,)
        The private gradient.
    beta : float
    """
    earlier = np.broadcast_to(momentum, gradient.shape)
    for start in range(0, len(gradient), BLOCK):
        block = slice(start, start + BLOCK)
        exact = np.multiply(gradient[block], 1.0 - beta, dtype=np.float64)
        exact += beta * earlier[block]
        gradient[block] = exact
    return gradient


@dataclass(frozen=True, eq=False)
class GradientSource:
    """Computes the private gradients of one client.

    Attributes
    ----------
    gradients : ClippedGradients
        The model, its loss and the clip norm C.
    trained : sequence of nn.Parameter
        The parameters of the model that are trained.
    dataset : Examples or OwnedExamples
    plan : PrivacyPlan
    randomness : Randomness
    node : int
        The node's number; seeded randomness differs from node to node.
    weight_decay : float
        lambda, of the L2 penalty.
    """

    gradients: ClippedGradients
    trained: Sequence[nn.Parameter]
    dataset: PrivateData
    plan: PrivacyPlan
    randomness: Randomness
    node: int
    weight_decay: float

    def check_model(self) -> None:
        """Refuse a model that cannot be trained privately, before anything is charged.

        Raises
        ------
        UnsupportedModelError
        """
        # Only a simulation may say what is wrong with its examples.
        with log_causes(not self.randomness.private):
            self.gradients.prepare(*self.dataset.like)

    def draw(self, step: int) -> BatchSource:
        """Return the examples and the randomness that a step draws its batch from."""
        randomness = self.randomness.for_step(self.node, step)
        return BatchSource(self.dataset, self.plan, randomness)

    def compute(self, request: GradientRequest) -> Vector | BaseException:
        """Return the private gradient of this client alone, or the error it raised."""
        try:
            load_weights(self.trained, request.weights)
            with log_causes(not self.randomness.private):
                draw = self.draw(request.step)
                return private_vector(self.gradients, draw, self.weight_decay)
        except BaseException as error:
            return error

"""Safe-DSHB, a client's half: the only place where the private data are.

One message, one step of Algorithm 1: charge the privacy ledger, draw a batch, clip each
example's gradient, average, add noise, update the momentum, keep it, send it. Nothing
else that depends on the data leaves: no loss, no norm, no text of an exception.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from functools import lru_cache
from logging import ERROR

from flwr.app import Context
from flwr.client import NumPyClient
from flwr.common import log
from torch import nn

from flwr_safedshb.client.dataset import Examples, Unpack, examples_of
from flwr_safedshb.client.evaluation import (
    Evaluator,
    Metrics,
    PrivateEvaluation,
    divided,
    evaluate,
    split_plans,
)
from flwr_safedshb.client.node import PLACE, RefusedError, admit, admit_evaluation
from flwr_safedshb.client.step import take_step
from flwr_safedshb.exchange.arrays import MARK, Arrays, Template
from flwr_safedshb.exchange.model import trained
from flwr_safedshb.flower.compat import Mod, objection
from flwr_safedshb.privacy.clipping.gradients import (
    ClippedGradients,
    Loss,
    UnsupportedModelError,
)
from flwr_safedshb.privacy.examples import causes_shown, interned
from flwr_safedshb.privacy.ledger.ledger import BudgetExhausted, LedgerError
from flwr_safedshb.privacy.plan import ALL, Clipping, PrivacyPlan
from flwr_safedshb.privacy.randomness.noise import Randomness, SecureRandomness

__all__ = ["RefusedError", "SafeDSHBClient", "marked", "refusal"]

Scalar = bool | bytes | float | int | str


class SafeDSHBClient(NumPyClient):
    """A Flower client that sends the momentum of its private gradients.

    The noise, the clip, the batch size and the sampler are those of `plan` and of the
    node's own config; no message can change them.

    Parameters
    ----------
    model : nn.Module
        Its parameters with ``requires_grad`` are trained, and cross the wire by name.
    loss : callable (outputs, targets) -> Tensor
        One value per example, or a torch loss module.
    dataset : Dataset, sequence, or pair of arrays
        The private examples: items that are pairs (input, target) or dicts, or whole
        arrays of inputs and targets, all of them also nested.
    plan : PrivacyPlan
    context : Context
        Of the node. Its config may hold ``state-dir``, the directory of the privacy
        ledger, and the rules of a `NodePolicy`.
    target : str, optional
        Of items that are dicts, the key of the target. What is left is the input: a
        dict of several entries is given to the model as keywords.
    unpack : callable, optional
        From an item of any other kind to its input and its target.
    weight_decay : float
        lambda, of the L2 penalty.
    max_epsilon, delta : float, optional
        The budget that the run asks for; at most the policy's.
    randomness : Randomness, optional
        By default unpredictable; seeded for simulations.
    node_keys : collection of str
        Keys of the node's config that belong to the app. Every other key must be a rule
        of its policy, so that a misspelt rule is an error.
    trusted_mods : collection of mods
        Mods of the ClientApp that leave the reply as it is. Under any other that is not
        known to do so, the client refuses to work.
    evaluation : PrivateEvaluation, optional
        Answer what models are worth on the data, with noise and charged as steps are.
        Examples that it holds out do not train: the plan is for the others.

    Raises
    ------
    RefusedError
        If the node's policy forbids the plan, or the privacy of a run cannot be kept.
    ValueError
        If the first items of the dataset are not what was said.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        dataset: object,
        plan: PrivacyPlan,
        context: Context,
        *,
        target: str | None = None,
        unpack: Unpack | None = None,
        weight_decay: float = 0.0,
        max_epsilon: float | None = None,
        delta: float | None = None,
        randomness: Randomness | None = None,
        node_keys: Collection[str] = (),
        trusted_mods: Collection[Mod] = (),
        evaluation: PrivateEvaluation | None = None,
    ) -> None:
        if plan.part != ALL:
            raise ValueError(f"part={plan.part!r} of the plan is for the client to say")
        _refuse_unmade(model, loss, randomness)
        self.randomness = SecureRandomness() if randomness is None else randomness
        with causes_shown(not self.randomness.private):
            data, size = examples_of(dataset, target, unpack)
        held_out = 0 if evaluation is None else evaluation.held_out
        self.dataset = evaluated = data
        if held_out:
            self.dataset, evaluated = divided(data, size, held_out)
        if size - held_out != plan.num_examples:
            raise ValueError(
                f"num_examples={plan.num_examples} of the plan must be the size of the "
                f"dataset, {size - held_out}; make the plan for this dataset"
            )
        self.model, self.loss = model, loss
        self.plan = plan
        self.context = context
        self.weight_decay = weight_decay
        self.max_epsilon, self.delta = max_epsilon, delta
        rules = tuple(e for e in context.node_config.items() if e[0] not in PLACE)
        self.ledger = admit(
            rules, plan, max_epsilon, delta, self.randomness.private, tuple(node_keys)
        )
        if isinstance(data, Examples):
            with causes_shown(not self.randomness.private):
                data.refuse_unread(self.ledger is None)
        self.evaluator: Evaluator | None = None
        if evaluation is not None:
            second = evaluation.plan(held_out or size)
            admit_evaluation(rules, second, tuple(node_keys))
            if held_out:
                self.plan, second = split_plans(plan, second, data, self.ledger)
            self.evaluator = Evaluator(evaluation, evaluated, second)
        self.trusted_mods = trusted_mods
        self.gradients, self.template, self.trained = _prepared(
            model, interned(loss), plan.clip_norm, plan.clipping
        )

    def fit(
        self, parameters: Arrays, config: Mapping[str, Scalar]
    ) -> tuple[Arrays, int, dict[str, Scalar]]:
        """Take one step, or as many as the message asks for.

        Parameters
        ----------
        parameters : list of arrays
            theta_t, the parameters that are trained, in the order of
            ``model.parameters()``.
        config : mapping
            ``step`` (t), ``momentum`` (beta), and from `SafeDSHB` also ``session``,
            the name of the run, ``anchor``, whether it may come back to this step, and
            ``local-steps`` (K) with their ``learning-rate`` (gamma).

        Returns
        -------
        momentum, num_examples, metrics
            m_t in float32, or the mean of K of them, m, and the mark of a momentum; in
            the last round also the run's ``epsilon`` and ``delta``, if there is one.

        Raises
        ------
        RefusedError
        """
        if (reason := objection(self.trusted_mods)) is not None:
            raise RefusedError(reason)
        try:
            momentum, stated = take_step(self, parameters, config)
        except Exception as error:
            refused = refusal(error)
        else:
            return momentum, self.plan.num_examples, {**stated, **marked()}
        # Outside the handler, so that no cause is attached.
        raise refused

    def count(self, parameters: Arrays, config: Mapping[str, Scalar]) -> Metrics:
        """Answer what a model is worth on the data, within the privacy guarantee.

        See `flwr_safedshb.client.evaluation`.

        Raises
        ------
        RefusedError
        """
        if (reason := objection(self.trusted_mods)) is not None:
            raise RefusedError(reason)
        try:
            return evaluate(self, parameters, config)
        except Exception as error:
            refused = refusal(error)
        raise refused


@lru_cache(maxsize=4)
def _prepared(
    model: nn.Module, loss: Loss, clip_norm: float, clipping: Clipping
) -> tuple[ClippedGradients, Template, list[nn.Parameter]]:
    """Check and hook a model once: that costs more than a step."""
    held = trained(model)
    template = Template(tuple(held), tuple(tuple(p.shape) for p in held.values()))
    gradients = ClippedGradients(model, loss, clip_norm, clipping)
    return gradients, template, [*held.values()]


def _refuse_unmade(model: object, loss: object, randomness: object) -> None:
    """Refuse a class, a name or a number where an object belongs."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={model!r} must be a module, such as Net()")
    if not callable(loss) or isinstance(loss, type):
        raise ValueError(f"loss={loss!r} must be one that is made, as nn.MSELoss() is")
    if randomness is not None and not hasattr(randomness, "for_step"):
        raise ValueError(f"randomness={randomness!r} must be SeededRandomness(0), say")


def refusal(error: Exception) -> RefusedError:
    """Return what the server may know of an error: the texts of others may quote data.

    The rest is in the log of this node.
    """
    match error:
        case RefusedError():
            return error
        case BudgetExhausted():
            text = "the privacy budget of this node is spent; nothing was released"
        case LedgerError():
            log(ERROR, "%s", error)
            text = "the privacy ledger of this node cannot be used"
        case UnsupportedModelError():
            text = str(error)
        case _:
            log(ERROR, "The step failed", exc_info=error)
            text = "the step failed; the log of this node says why"
    return RefusedError(text)


def marked() -> dict[str, Scalar]:
    """Return the mark of a momentum, with a number that nobody can guess.

    A record travels under the hash of its bytes. One that others could guess they could
    send first, with parts that are not its own.
    """
    return {MARK: secrets.randbits(62)}

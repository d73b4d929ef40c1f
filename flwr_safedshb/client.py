"""Safe-DSHB, the client's half, as a Flower client.

A training message makes the client take one step of Algorithm 1, lines 4 to 7
(`algorithm.step`). A node sends its momentum under the names of the model's arrays, a
tag, and the number of examples; or a refusal, whose text says nothing about data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Generator, Mapping
from functools import lru_cache
from logging import WARNING
from typing import cast

from flwr.app import ConfigRecord, Context
from flwr.client import NumPyClient
from flwr.common import log
from torch import nn
from torch.nn.modules.loss import _Loss

from flwr_safedshb.algorithm.admission import allows_plain_evaluation, open_budget
from flwr_safedshb.algorithm.answer_evaluation import (
    Evaluator,
    Metrics,
    PrivateEvaluation,
)
from flwr_safedshb.algorithm.budget import RunTerms
from flwr_safedshb.algorithm.expectation import log_node_expectation
from flwr_safedshb.algorithm.model_arrays import trained_parameters
from flwr_safedshb.algorithm.refusal import RefusedError, to_refusal
from flwr_safedshb.algorithm.requests import (
    TrainRequest,
    check_weights,
    parse_evaluate_request,
    parse_train_request,
)
from flwr_safedshb.algorithm.run_target import (
    calibrate_plans,
    check_length,
    make_terms,
)
from flwr_safedshb.algorithm.signing import StepSigner
from flwr_safedshb.algorithm.split import split_examples
from flwr_safedshb.algorithm.step import (
    GradientRequest,
    GradientSource,
    resume_step,
    training_step,
)
from flwr_safedshb.algorithm.wire import (
    LOSS,
    NUM_EXAMPLES,
    PRIVATE_EVALUATION,
    SEEN,
    UNUSABLE,
    Arrays,
    Template,
    make_momentum_tag,
    split_vector,
)
from flwr_safedshb.flower.compat import Mod, check_mods
from flwr_safedshb.privacy.bad_examples import log_causes
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.datasets import Unpack, make_examples
from flwr_safedshb.privacy.inspection import inspect_examples
from flwr_safedshb.privacy.losses import Loss, is_rowwise_loss
from flwr_safedshb.privacy.owners import Owners, PrivateData, make_owned_examples
from flwr_safedshb.privacy.plan import ALL, Clipping, PrivacyPlan
from flwr_safedshb.privacy.private_gradient import Vector
from flwr_safedshb.privacy.randomness.noise import Randomness, SecureRandomness
from flwr_safedshb.privacy.target import PrivacyTarget

Scalar = bool | bytes | float | int | str
# What a simulated node found out about its examples, and of how many at most.
_EXAMPLES, _MAX_INSPECTED = "safedshb-examples", 1000
# Momentum, number of examples, metrics.
FitResult = tuple[Arrays, int, dict[str, Scalar]]
# Loss, number of examples, metrics.
EvaluateResult = tuple[float, int, dict[str, Scalar]]

_shared_losses: dict[object, Loss] = {}


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
    plan : PrivacyTarget or PrivacyPlan
        The epsilon of the run, for which each node finds its own noise, or the noise
        itself.
    context : Context
        Of the node. Its config may hold ``state-dir``, the directory of the privacy
        ledger, and the rules of a `NodePolicy`.
    target : str, optional
        Of items that are dicts, the key of the target. What is left is the input: a
        dict of several entries is given to the model as keywords.
    unpack : callable, optional
        From an item of any other kind to its input and its target.
    like : (input, target), optional
        Of a dataset of items, a made-up example, such as ``(torch.zeros(1, 28, 28),
        0)``: all items have its shapes and types, and others are left out. Without
        seeded randomness it must be given, because no item may decide about others.
    owners : sequence, array or column, or str, optional
        Whose example each is, for a plan with ``unit="person"``: identifiers such as
        patient numbers, or the key of items that are dicts. ``num_examples`` of the
        plan then counts persons, and so does ``held_out`` of the evaluation.
    max_per_owner : int
        K: a step takes the mean gradient of at most so many examples of a person,
        drawn anew each time. Its cost is that of K examples for every person.
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
        plan: PrivacyTarget | PrivacyPlan,
        context: Context,
        *,
        target: str | None = None,
        unpack: Unpack | None = None,
        like: tuple[object, object] | None = None,
        owners: Owners | None = None,
        max_per_owner: int = 5,
        weight_decay: float = 0.0,
        max_epsilon: float | None = None,
        delta: float | None = None,
        randomness: Randomness | None = None,
        node_keys: Collection[str] = (),
        trusted_mods: Collection[Mod] = (),
        evaluation: PrivateEvaluation | None = None,
    ) -> None:
        _check_arguments(model, loss, randomness, plan)
        held_out = 0 if evaluation is None else evaluation.held_out
        _check_owners(plan, owners, held_out)
        source = SecureRandomness() if randomness is None else randomness
        with log_causes(not source.private):
            data: PrivateData
            if owners is None:
                data, per_owner = make_examples(dataset, target, unpack, like), 1
            else:
                items = dataset, owners, max_per_owner, target, unpack, like
                data, per_owner = make_owned_examples(*items), max_per_owner
            if source.private:
                data.refuse_undeclared()
        trains, evaluates = split_examples(data, held_out) if held_out else (data, data)
        terms = RunTerms(max_epsilon, delta, source.private, tuple(node_keys))
        self.target = plan if isinstance(plan, PrivacyTarget) else None
        if isinstance(plan, PrivacyTarget):
            terms = make_terms(plan, terms, context.node_config)
            plan, evaluation = _calibrate(plan, trains, evaluation, evaluates)
        if trains.size != plan.num_examples:
            what = "size" if owners is None else "number of persons"
            raise ValueError(
                f"num_examples={plan.num_examples} of the plan must be the {what} of "
                f"the dataset, {trains.size}; make the plan for this dataset"
            )
        self.budget = open_budget(
            context,
            plan,
            None if evaluation is None else evaluation.plan(evaluates.size, plan.unit),
            terms,
            data if held_out else None,
        )
        self.model, self.loss, self.context = model, loss, context
        self.dataset, self.plan, self.randomness = trains, self.budget.plan, source
        self.trusted_mods = trusted_mods
        gradients, self.template, trained = _prepare_model(
            model, _share_loss(loss), plan.clip_norm, plan.clipping, per_owner
        )
        # The partition of a simulation: node ids differ between engines.
        node = int(context.node_config.get("partition-id", context.node_id))
        self.source = GradientSource(
            gradients, trained, trains, self.plan, source, node, weight_decay
        )
        self.evaluator = (
            None
            if evaluation is None
            else Evaluator(evaluation, evaluates, model, loss, self.source)
        )
        # On the object, so that a subclass's ``evaluate`` cannot be called directly.
        allowed = allows_plain_evaluation(context.node_config, node_keys)
        vars(self)["evaluate"] = route_evaluation(self, allows_plain=allowed)

    def fit(self, parameters: Arrays, config: Mapping[str, Scalar]) -> FitResult:
        """Take one step, or as many as the message asks for.

        Parameters
        ----------
        parameters : list of arrays
            theta_t, the trained parameters in the order of ``model.parameters()``.
        config : mapping
            ``step`` (t), ``momentum`` (beta), and from `SafeDSHB` also ``session``,
            the name of the run, ``anchor``, whether it may come back to this step, and
            ``local-steps`` (K) with their ``learning-rate`` (gamma).

        Returns
        -------
        momentum, num_examples, metrics
            m_t in float32, or the mean of K of them; m; and the momentum tag, in the
            last round also the run's ``epsilon`` and ``delta``, if they are known, and
            a signed receipt where the server asks for one.

        Raises
        ------
        RefusedError
        """
        steps = self.take_steps(parameters, config)
        try:
            request = next(steps)
            while True:
                request = resume_step(steps, self.source.compute(request))
        except StopIteration as done:
            return cast(FitResult, done.value)

    def take_steps(
        self, parameters: Arrays, config: Mapping[str, Scalar]
    ) -> Generator[GradientRequest, Vector, FitResult]:
        """Take steps as `fit` does, with gradients that the caller computes.

        Raises
        ------
        RefusedError
        """
        self._check_mods()
        try:
            request = parse_train_request(config, self.context.run_id)
            if self.target is not None:
                check_length(self.target, request)
            check_weights(parameters, self.template)
            self.source.check_model()
            signer = None
            if request.sign_receipt:  # refused before anything is charged
                node = self.context.node_id, self.context.node_config
                signer = StepSigner(*node, self.budget)
            counts = {} if self.budget.protects_data else self._count_examples()
            if request.step == 0:
                self._log_expectation(request, parameters)
            momentum = yield from training_step(
                request, parameters, self.budget, self.budget.store
            )
            arrays = split_vector(momentum, self.template.shapes)
            metrics: dict[str, Scalar] = {**make_momentum_tag()}
            if request.report_privacy:
                metrics |= {**self.budget.report_cost(request), **counts}
            if signer is not None:
                metrics |= signer.sign(request, parameters, arrays)
        except GeneratorExit:
            raise
        except BaseException as error:
            refusal = to_refusal(error)
        else:
            return arrays, self.plan.num_examples, metrics
        # Outside the handler, so that the error and its data are not attached.
        raise refusal

    def evaluate(self, parameters: Arrays, config: dict[str, Scalar]) -> EvaluateResult:
        """Refuse an evaluation without noise; a subclass may answer it."""
        raise RefusedError("this client does not evaluate models on its data")

    def evaluate_privately(
        self, parameters: Arrays, config: Mapping[str, Scalar]
    ) -> Metrics:
        """Return noisy counts of what a model gets right, charged like a step.

        Parameters
        ----------
        parameters : list of arrays
            theta.
        config : mapping
            ``private-evaluation``, the number of the round, ``max-loss``, ``per-class``
            and ``session``. Whatever they are, the answer is as private.

        Raises
        ------
        RefusedError
        """
        self._check_mods()
        try:
            check_weights(parameters, self.template)
            if self.evaluator is None:
                raise RefusedError("this client does not evaluate models on its data")
            request = parse_evaluate_request(config, self.context.run_id)
            metrics = self.evaluator.answer(request, parameters, self.budget)
        except BaseException as error:
            refusal = to_refusal(error)
        else:
            return {**metrics, **make_momentum_tag()}
        raise refusal

    def _count_examples(self) -> dict[str, int]:
        """Count what cannot be used, once, in a simulation that protects nobody.

        Raises
        ------
        RefusedError
            If it is more than an accident; says which column or labels.
        """
        state = self.context.state
        if _EXAMPLES not in state:
            gradients = self.source.gradients
            found = inspect_examples(gradients, self.dataset, _MAX_INSPECTED)
            if found.is_hopeless:
                raise RefusedError(str(found))
            if text := str(found):
                log(WARNING, "The examples of a simulated node: %s", text)
            counts = {SEEN: found.seen, UNUSABLE: found.unusable}
            state[_EXAMPLES] = ConfigRecord({**counts})
        return cast(dict[str, int], {**state[_EXAMPLES]})

    def _log_expectation(self, request: TrainRequest, parameters: Arrays) -> None:
        """Log on this node, from public numbers, whether the run has a chance."""
        known = request.run.steps if request.run is not None else None
        if known is None and self.target is not None:
            known = self.target.steps
        if known is not None:
            nodes = self.context.node_config.get("num-partitions")
            log_node_expectation(
                self.plan,
                parameters,
                known,
                (request.learning_rate, request.momentum),
                nodes if isinstance(nodes, int) else None,
            )

    def _check_mods(self) -> None:
        """Refuse to work under a mod that could change the reply."""
        if (reason := check_mods(self.trusted_mods)) is not None:
            raise RefusedError(reason)


def route_evaluation(
    client: SafeDSHBClient, *, allows_plain: bool
) -> Callable[[Arrays, dict[str, Scalar]], EvaluateResult]:
    """Return an ``evaluate`` of the legacy API that answers both kinds of requests."""

    def evaluate(parameters: Arrays, config: dict[str, Scalar]) -> EvaluateResult:
        if PRIVATE_EVALUATION in config:
            found = cast(
                dict[str, Scalar], client.evaluate_privately(parameters, config)
            )
            return cast(float, found[LOSS]), cast(int, found[NUM_EXAMPLES]), found
        if not allows_plain:
            refuse_plain_evaluation(parameters, config)
        return type(client).evaluate(client, parameters, config)

    return evaluate


def refuse_plain_evaluation(parameters: object, config: object) -> EvaluateResult:
    """Replace a client's own ``evaluate`` on a node that keeps a ledger."""
    raise RefusedError(
        "this node keeps a privacy budget, and an evaluation without noise is outside "
        "of it; ask for a private evaluation (evaluate_every of the strategy), or let "
        "the node's owner set allow-plain-evaluation=true"
    )


@lru_cache(maxsize=4)
def _prepare_model(
    model: nn.Module, loss: Loss, clip_norm: float, clipping: Clipping, per_owner: int
) -> tuple[ClippedGradients, Template, list[nn.Parameter]]:
    """Check and hook a model, once: that costs more than a step."""
    trained = trained_parameters(model)
    shapes = tuple(tuple(parameter.shape) for parameter in trained.values())
    gradients = ClippedGradients(model, loss, clip_norm, clipping, per_owner)
    return gradients, Template(tuple(trained), shapes), [*trained.values()]


def _calibrate(
    target: PrivacyTarget,
    trains: PrivateData,
    evaluation: PrivateEvaluation | None,
    evaluates: PrivateData,
) -> tuple[PrivacyPlan, PrivateEvaluation | None]:
    """Return the plans that meet a target; a refusal names sizes, which are public."""
    # Examples that are read one by one are charged for both, see `split_plans`.
    separate = trains is not evaluates and trains.tensors is not None
    try:
        return calibrate_plans(
            target, trains.size, evaluation, evaluates.size, separate=separate
        )
    except ValueError as error:
        raise RefusedError(str(error)) from None


def _check_arguments(
    model: object, loss: object, randomness: object, plan: object
) -> None:
    """Refuse a class, a name or a number where an object belongs."""
    if not isinstance(plan, PrivacyPlan | PrivacyTarget):
        raise ValueError(
            f"plan={plan!r:.60} must be a PrivacyTarget, such as "
            "PrivacyTarget(epsilon=3.0, delta=1e-5, steps=60), or a PrivacyPlan"
        )
    if isinstance(plan, PrivacyPlan) and plan.part != ALL:
        raise ValueError(f"part={plan.part!r} of the plan is for the client to say")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={model!r} must be a module, such as Net()")
    if not callable(loss) or isinstance(loss, type):
        raise ValueError(f"loss={loss!r} must be an instance, such as nn.MSELoss()")
    if randomness is not None and not hasattr(randomness, "for_step"):
        raise ValueError(f"randomness={randomness!r} must be SeededRandomness(0), say")


def _check_owners(
    plan: PrivacyPlan | PrivacyTarget, owners: Owners | None, held_out: int
) -> None:
    """Refuse owners that do not fit the plan, or that cannot be held out."""
    if held_out and isinstance(owners, str):
        raise ValueError(
            f"held_out={held_out} needs owners as an array: with the key "
            f"owners={owners!r} an item that cannot be read would decide who is held "
            "out"
        )
    if owners is None and plan.unit == "person":
        raise ValueError(
            "unit='person' of the plan needs owners: say whose example each is, as in "
            "owners=patient_numbers"
        )
    if owners is not None and plan.unit != "person":
        raise ValueError(
            f"owners needs a plan for persons, and this one has unit={plan.unit!r}; "
            "make it with unit='person' and count persons in num_examples and "
            "batch_size"
        )


def _share_loss(loss: Loss) -> Loss:
    """Return one object for equal losses of torch, and any other loss as it is.

    Apps make a new loss for every message, and a model is checked with the very object.
    """
    if not isinstance(loss, _Loss) or not is_rowwise_loss(loss):
        return loss
    if any(weight is not None for weight in loss._buffers.values()):
        return loss
    options = {name: v for name, v in vars(loss).items() if not name.startswith("_")}
    # A copy, because the app may change its own.
    return _shared_losses.setdefault((type(loss), *options.items()), copy.copy(loss))

"""Check a run from its checkpoint and its records, without data and without trust.

What is computed again: every signature and hash; the chain of each node's charges and
the epsilon that it states; the rule's answer and kappa in every round; where momentums
were kept every step of the model; and the metrics and the privacy card that the run
left. What cannot be: whether a node drew its noise; whether a server has left out a
reply; and who holds a key, unless the owners' public keys are given.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
from flwr.app import MetricRecord
from numpy.typing import NDArray

from flwr_safedshb.aggregation.gram import GramRule, centred_gram_matrix, weighted_sum
from flwr_safedshb.aggregation.rule import FloatArray, Floats, Rule, Weighing
from flwr_safedshb.aggregation.scatter import scatter_lambda, squared_distances
from flwr_safedshb.algorithm.checkpoint import load_checkpoint
from flwr_safedshb.algorithm.output import (
    Output,
    add_to_mean,
    draw_index,
    select_output,
)
from flwr_safedshb.algorithm.privacy_card import make_card
from flwr_safedshb.algorithm.progress import Progress
from flwr_safedshb.algorithm.receipts import (
    KnownNode,
    find_problems,
    hash_arrays,
)
from flwr_safedshb.algorithm.round_record import RecordError, RoundRecord, name_folder
from flwr_safedshb.algorithm.rule_names import parse_rule
from flwr_safedshb.algorithm.run_identity import fingerprint_arrays
from flwr_safedshb.algorithm.wire import decode_arrays, encode_record

# Computed again on another machine, a number may differ by its rounding.
_SAME = 1e-6
# Subsets whose eigenvalues are as near as this tie, and either is SMEA's answer.
_TIE = 1e-8
Layers = list[NDArray[np.generic]]


@dataclass
class Verification:
    """What was found.

    Attributes
    ----------
    session, rule : str
    rounds, num_rounds : int
        The rounds that were done, and those that were planned.
    whole : bool
        Whether momentums were kept, so that every step of the model was computed again.
    nodes : dict of int to KnownNode
        Each node after its last receipt.
    problems : list of str
        Empty if everything is in order.
    """

    session: str
    rule: str
    rounds: int
    num_rounds: int
    whole: bool = False
    nodes: dict[int, KnownNode] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def verify_run(checkpoint: Path, keys: Collection[bytes] = ()) -> Verification:
    """Check a run.

    Parameters
    ----------
    checkpoint : Path
        With the folder of its records, and its privacy card, beside it.
    keys : collection of bytes
        Public keys of the nodes' owners, as compressed points. Without any, the records
        say themselves who signed.

    Raises
    ------
    FileNotFoundError, ValueError
        If there is no checkpoint, or it is of a run without receipts.
    """
    progress = load_checkpoint(checkpoint)
    settings = progress.settings
    if settings.get("receipts") is None:
        raise ValueError(
            f"the run of {checkpoint} kept no receipts; ask for them by "
            'SafeDSHB(receipts="momentums", checkpoint=...)'
        )
    rule = parse_rule(str(settings.get("aggregation")))
    found = Verification(
        progress.session, str(rule), progress.step, progress.num_rounds
    )
    found.whole = settings["receipts"] == "momentums"
    folder, before = name_folder(checkpoint), None
    output = cast(Output, settings.get("output"))
    again = replace(progress, kept=None)  # to compute what the run returned again
    for number in range(1, progress.step + 1):
        try:
            record = RoundRecord.read(folder, number)
            problems = _check_round(record, before, progress, rule, found)
            if not problems:
                _repeat_output(again, record, output)
        except RecordError as error:
            record, problems = None, [str(error)]
        found.problems += [f"round {number}: {problem}" for problem in problems]
        before = record
    if len(progress.train) != progress.step:
        found.problems.append("the checkpoint has metrics of other rounds")
    found.problems += _check_end(before, progress, found.whole)
    if not found.problems:
        found.problems += _check_output(again, progress, output, found.whole)
    found.problems += _check_card(checkpoint, progress, rule)
    for node, known in found.nodes.items():
        if keys and known.key not in keys:
            found.problems.append(f"node {node}: its key is none of those given")
    owners = [known.key for known in found.nodes.values()]
    if len({*owners}) < len(owners):
        found.problems.append("two nodes have signed with the same key")
    return found


def _check_round(
    record: RoundRecord,
    before: RoundRecord | None,
    progress: Progress,
    rule: Rule,
    found: Verification,
) -> list[str]:
    """Return what is wrong with a round; remember its nodes' receipts."""
    problems = []
    if record.session != progress.session:
        problems.append("it is of another run")
    momentums: list[Layers] = []
    if found.whole:
        names = list(progress.arrays)
        try:
            model = [record.arrays[f"model/{name}"] for name in names]
            momentums = [
                [record.arrays[f"{i}/{name}"] for name in names]
                for i in range(len(record.replies))
            ]
        except KeyError as error:
            return [*problems, f"its array {error} is missing"]
        if hash_arrays(model) != record.model:
            problems.append("its model is not the one that was signed")
        if before is None and fingerprint_arrays(
            encode_record(names, model)
        ) != progress.settings.get("initial_arrays"):
            problems.append("the run began with another model")
    problems += _check_receipts(record, momentums, progress, found)
    problems += _check_metrics(record, progress.train.get(record.number))
    problems += _check_settings(record, progress.settings)
    if problems:  # what follows would be about other vectors
        return problems
    problems += _check_answer(record, rule, momentums)
    if before is not None:
        problems += _check_step(before, rule, record, progress)
    return problems


def _check_receipts(
    record: RoundRecord,
    momentums: Sequence[Layers],
    progress: Progress,
    found: Verification,
) -> list[str]:
    local_steps = cast(int, progress.settings["local_steps"])
    step = (record.number - 1) * local_steps
    problems = []
    nodes = [node for node, _ in record.replies]
    if len({*nodes}) < len(nodes):
        problems.append("a node has replied twice")
    for i, (node, receipt) in enumerate(record.replies):
        expected = {
            "node": node,
            "session": progress.session,
            "step": step,
            "local_steps": local_steps,
            "model": record.model,
        }
        if found.whole:
            expected["momentum"] = hash_arrays(momentums[i])
            if any(layer.dtype != np.float32 for layer in momentums[i]):
                problems.append(f"node {node}: its momentum is not in float32")
        known, wrong = find_problems(receipt, expected, found.nodes.get(node))
        problems += [f"node {node}: {problem}" for problem in wrong]
        if known is None:
            continue
        stated, epsilon = known.charge.epsilon, known.charge.compute_epsilon()
        if not math.isclose(stated, epsilon, rel_tol=_SAME):
            problems.append(
                f"node {node}: it states epsilon {stated:g}, not {epsilon:g}"
            )
        found.nodes[node] = known
    return problems


def _check_momentums(record: RoundRecord, momentums: Sequence[Layers]) -> list[str]:
    problems = []
    for (node, receipt), layers in zip(record.replies, momentums, strict=True):
        if any(layer.dtype != np.float32 for layer in layers):
            problems.append(f"node {node}: its momentum is not in float32")
        elif hash_arrays(layers) != receipt.parse()[0].momentum:
            problems.append(f"node {node}: its momentum is not the one that it signed")
    return problems


def _check_metrics(record: RoundRecord, metrics: MetricRecord | None) -> list[str]:
    """Compare a record with the metrics that the run left."""
    if metrics is None:
        return ["the checkpoint has no metrics of it"]
    left_out = None
    if record.weights is not None:
        weighed = zip(record.replies, record.weights, strict=True)
        left_out = sorted(node for (node, _), weight in weighed if weight == 0.0)
    pairs: list[tuple[str, object]] = [
        ("replies", len(record.replies)),
        ("num-malicious-nodes", record.num_malicious_nodes),
        ("skipped", int(record.skipped)),
        ("learning-rate", record.learning_rate),
        ("left-out", left_out),
    ]
    if record.kappa is not None:
        pairs.append(("kappa", record.kappa))
    return [
        f"{name} is {value} in its record and {metrics.get(name)} in the checkpoint"
        for name, value in pairs
        if metrics.get(name) != value
    ]


def _check_settings(record: RoundRecord, settings: Mapping[str, object]) -> list[str]:
    """Compare a record with the settings that identify the run."""
    problems, rates = [], settings.get("server_learning_rate")
    rate = rates[record.number - 1] if isinstance(rates, list) else rates
    if record.learning_rate != rate:
        problems.append(f"the learning rate is {record.learning_rate}, not {rate}")
    if record.num_malicious_nodes > cast(int, settings["num_malicious_nodes"]):
        problems.append(f"f={record.num_malicious_nodes} is more than the run's")
    return problems


def _check_answer(
    record: RoundRecord, rule: Rule, momentums: Sequence[Layers]
) -> list[str]:
    """Ask the rule again, and compare its answer."""
    n, f = len(record.replies), record.num_malicious_nodes
    if n <= 2 * f:
        return [] if record.skipped else [f"a step was taken with n={n}, f={f}"]
    if not isinstance(rule, GramRule):
        # The step of the model shows what it answered.
        return [] if record.weights is None else ["its rule gives no weights"]
    try:
        gram = _get_gram(record, momentums)
        again = rule.weigh(gram, f)
    except (ValueError, ArithmeticError) as error:
        return [] if record.skipped else [f"the rule fails: {error}"]
    if record.weights is None:
        return ["it was skipped, and the rule has an answer"]
    weights = np.array(record.weights)
    problems = []
    same = np.allclose(weights, again.weights, rtol=_SAME, atol=1e-12)
    if not same and not _is_tie(gram, weights, again):
        problems.append("the rule selects other replies")
    if not _is_same_kappa(record.kappa, again.kappa):
        problems.append(f"kappa is {again.kappa}, and it states {record.kappa}")
    return problems


def _get_gram(record: RoundRecord, momentums: Sequence[Layers]) -> FloatArray:
    n, f = len(record.replies), record.num_malicious_nodes
    if momentums:
        return centred_gram_matrix(cast("list[list[Floats]]", momentums), f)
    gram = record.arrays.get("gram")
    if gram is None or gram.shape != (n, n) or gram.dtype != np.float64:
        raise RecordError("its Gram matrix is missing")
    if not np.array_equal(gram, gram.T):
        raise RecordError("its Gram matrix is not symmetric")
    return cast(FloatArray, gram)


def _is_tie(gram: FloatArray, weights: FloatArray, again: Weighing) -> bool:
    """Return whether a subset is as good as SMEA's, but for rounding."""
    subset = np.flatnonzero(weights)
    if again.subset is None or again.lower_bound is None:
        return False
    if len(subset) != len(again.subset) or np.ptp(weights[subset]) > 1e-12:
        return False
    value = scatter_lambda(squared_distances(gram), subset) / len(subset)
    return bool(value <= again.lambda_max * (1.0 + _TIE))


def _is_same_kappa(stated: float | None, again: float | None) -> bool:
    if again is None or not math.isfinite(again):
        return stated is None
    return stated is not None and math.isclose(stated, again, rel_tol=_SAME)


def _check_step(
    record: RoundRecord, rule: Rule, after: RoundRecord, progress: Progress
) -> list[str]:
    """Check that a round's model follows from the round before."""
    if record.skipped:
        return [] if after.model == record.model else ["the model changed in a skip"]
    names = list(progress.arrays)
    if f"model/{names[0]}" not in record.arrays:
        return []
    later = [after.arrays[f"model/{name}"] for name in names]
    return _compare_step(record, rule, later, progress)


def _compare_step(
    record: RoundRecord, rule: Rule, later: Layers, progress: Progress
) -> list[str]:
    """Compare theta_{t+1} = theta_t - K gamma R_t with the model that came next."""
    names = list(progress.arrays)
    model = [record.arrays[f"model/{name}"] for name in names]
    vectors = [
        [cast(Floats, record.arrays[f"{i}/{name}"]) for name in names]
        for i in range(len(record.replies))
    ]
    try:
        if record.weights is None:
            direction, _ = rule.aggregate(vectors, record.num_malicious_nodes)
        else:
            direction = weighted_sum(vectors, np.array(record.weights))
    except (ValueError, ArithmeticError) as error:
        return [f"the step before cannot be computed: {error}"]
    local_steps = cast(int, progress.settings["local_steps"])
    for theta, layer, value in zip(model, direction, later, strict=True):
        move = record.learning_rate * local_steps * layer.astype(np.float64)
        exact = theta.astype(np.float64) - move
        scale = np.abs(theta.astype(np.float64)) + np.abs(move)
        if value.dtype != theta.dtype or value.shape != theta.shape:
            return ["the model has another form than the one before"]
        # R_t was rounded to float32, and the sum to the model's own type.
        eps = np.finfo(theta.dtype.char).eps
        room = 4.0 * max(float(eps), float(np.finfo(np.float32).eps))
        if not (np.abs(value.astype(np.float64) - exact) <= room * scale).all():
            return ["the model does not follow from the round before"]
    return []


def _check_end(
    record: RoundRecord | None, progress: Progress, whole: bool
) -> list[str]:
    """Check that the checkpoint's model follows from the last round."""
    if record is None:
        return []
    arrays = decode_arrays(progress.arrays)
    if record.skipped:
        same = hash_arrays(arrays) == record.model
        return [] if same else ["the model at the end changed in a skipped round"]
    if not whole:
        return []
    rule = parse_rule(str(progress.settings.get("aggregation")))
    found = _compare_step(record, rule, arrays, progress)
    return [f"at the end {problem}" for problem in found]


def _repeat_output(again: Progress, record: RoundRecord, output: Output) -> None:
    """Keep what the run kept when it sent a round's model, if that was recorded."""
    names = list(again.arrays)
    if output == "last" or f"model/{names[0]}" not in record.arrays:
        return
    model = encode_record(names, [record.arrays[f"model/{name}"] for name in names])
    state = replace(again, step=record.number - 1, arrays=model)
    if output == "average":
        add_to_mean(state)
        again.kept = state.kept
    elif state.step == draw_index(again.seed, again.num_rounds):
        again.kept = model


def _check_output(
    again: Progress, progress: Progress, output: Output, whole: bool
) -> list[str]:
    """Compare the model that the run returned, where it is not its last one."""
    if output == "last" or not whole:
        return []
    if output == "average":
        add_to_mean(again)
    kept = [[] if r.kept is None else decode_arrays(r.kept) for r in (again, progress)]
    fine = len(kept[0]) == len(kept[1]) and all(
        np.allclose(mine, theirs, rtol=_SAME, atol=1e-12)
        for mine, theirs in zip(*kept, strict=True)
    )
    return [] if fine else [f"the model of output={output!r} is not that of the run"]


def _check_card(checkpoint: Path, progress: Progress, rule: Rule) -> list[str]:
    """Compare the privacy card, if there is one, with what is known of the run."""
    path = checkpoint.with_suffix(".privacy.json")
    if not path.exists():
        return []
    model = select_output(progress, cast(Output, progress.settings.get("output")))
    expected = json.loads(json.dumps(make_card(progress, rule, model).to_dict()))
    try:
        stated = json.loads(path.read_bytes())
    except ValueError as error:
        return [f"the privacy card cannot be read: {error}"]
    if not isinstance(stated, Mapping):
        return ["the privacy card is no object"]
    names = ("session", "model", "stated_by_nodes", "robustness")
    return [
        f"{name} of the privacy card is not that of the run"
        for name in names
        if stated.get(name) != expected[name]
    ]

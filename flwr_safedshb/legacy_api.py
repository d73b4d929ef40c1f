"""Safe-DSHB for Flower's legacy API, ``ServerAppComponents(strategy=...)``.

`ClassicStrategy` translates between the two APIs and drives a `SafeDSHB`: options,
rounds, checks and results are the same.

    strategy = ClassicStrategy(SafeDSHB(num_malicious_nodes=1), trained_arrays(model))
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=30))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.common import (
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    NDArrays,
    Parameters,
    Scalar,
    parameters_to_ndarrays,
)
from flwr.server import ClientManager
from flwr.server.strategy import Strategy

from flwr_safedshb.algorithm.participation import warn_of_open_network
from flwr_safedshb.algorithm.progress import StopRun
from flwr_safedshb.algorithm.settings import check_initial_arrays
from flwr_safedshb.algorithm.wire import MOMENTUM_TAG
from flwr_safedshb.flower.compat import (
    NUMPY,
    ErrorCode,
    make_array_unchecked,
    set_message_id,
)
from flwr_safedshb.flower.legacy import ClientManagerGrid, ClientProxy, find_grid
from flwr_safedshb.strategy import SafeDSHB

EvaluateFn = Callable[
    [int, NDArrays, dict[str, Scalar]], tuple[float, dict[str, Scalar]] | None
]
ConfigFn = Callable[[int], dict[str, Scalar]]

# The legacy API has no time limit for a round; this is the one of `SafeDSHB.start`.
_TIMEOUT = 3600.0


class ClassicStrategy(Strategy):
    """A `SafeDSHB` for ``ServerAppComponents`` and ``ClientApp(client_fn=...)``.

    Parameters
    ----------
    strategy : SafeDSHB
        With all its options.
    initial : ArrayRecord or Parameters
        The initial model, ``trained_arrays(model)``; no client is asked for it.
    num_rounds : int, optional
        That of the ``ServerConfig``, which a strategy does not see. Without it there is
        no checkpoint and no output but the last model, and nodes report in every round
        what the run has cost so far.
    evaluate_fn : callable (round, arrays, config) -> (loss, metrics), optional
        Evaluates the model on the server, as in Flower's own strategies.
    on_fit_config_fn, on_evaluate_config_fn : callable (round) -> config, optional
        Further config entries for the clients.
    fit_metrics_aggregation_fn, evaluate_metrics_aggregation_fn
        Refused, because one hostile client decides an average.
    """

    def __init__(
        self,
        strategy: SafeDSHB,
        initial: ArrayRecord | Parameters,
        *,
        num_rounds: int | None = None,
        evaluate_fn: EvaluateFn | None = None,
        on_fit_config_fn: ConfigFn | None = None,
        on_evaluate_config_fn: ConfigFn | None = None,
        fit_metrics_aggregation_fn: None = None,
        evaluate_metrics_aggregation_fn: None = None,
    ) -> None:
        if not isinstance(strategy, SafeDSHB):
            raise ValueError(
                f"strategy is a {type(strategy).__name__}; give a SafeDSHB, as in "
                "ClassicStrategy(SafeDSHB(...), initial)"
            )
        if strategy.settings.evaluate_per_class:
            raise ValueError(
                "evaluate_per_class=True needs the Message API (SafeDSHB.start): the "
                "legacy API carries no lists; leave it out"
            )
        for kind, given in (
            ("fit", fit_metrics_aggregation_fn),
            ("evaluate", evaluate_metrics_aggregation_fn),
        ):
            if given is not None:
                raise ValueError(
                    f"{kind}_metrics_aggregation_fn is not taken: one hostile client "
                    "would decide its average; leave it out, and let nodes evaluate "
                    "privately with SafeDSHB(evaluate_every=10), or the server with "
                    "evaluate_fn"
                )
        if num_rounds is None and (
            strategy.settings.checkpoint or strategy.settings.output != "last"
        ):
            raise ValueError(
                "a checkpoint, or an output other than 'last', needs num_rounds here: "
                "say that of the ServerConfig"
            )
        self.strategy = strategy
        self.num_rounds = num_rounds
        self.evaluate_fn = evaluate_fn
        self.fit_config, self.evaluate_config = on_fit_config_fn, on_evaluate_config_fn
        self._arrays = (
            _to_record(initial) if isinstance(initial, Parameters) else initial
        )
        check_initial_arrays(self._arrays)
        self._first, self._ended = True, False
        if num_rounds is not None:
            # What later configs contain is unknown, and does not identify the run.
            progress = strategy.run.begin(self._arrays, num_rounds, _TIMEOUT)
            self._arrays = progress.arrays
        self._left = (
            None if num_rounds is None else num_rounds - strategy.run.rounds_done
        )
        self._asked: dict[str, Message] = {}

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters:
        """Return the initial model, or that of the checkpoint."""
        self.strategy.summary()
        return _to_parameters(self._arrays)

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Return the instructions of a round's clients; none once the run has ended."""
        if self._ended or (self._left is not None and server_round > self._left):
            return []
        grid = ClientManagerGrid(client_manager)
        config = _make_config(self.fit_config, server_round)
        try:
            messages = self.strategy.configure_train(
                server_round, self._arrays, config, grid
            )
        except StopRun:
            self._finish_run()
            return []
        behind = find_grid(client_manager)
        settings = self.strategy.settings
        if self._first and behind is not None and settings.num_malicious_nodes:
            f = settings.num_malicious_nodes
            warn_of_open_network(behind, f, settings.authenticated_nodes)
        self._first = False
        if not messages:
            # A legacy server does not aggregate a round without clients.
            self._aggregate_replies(server_round, ())
        return [
            (proxy, FitIns(_to_parameters(arrays), config))
            for proxy, arrays, config in self._list_instructions(
                messages, client_manager
            )
        ]

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: Sequence[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Aggregate the momentums and take a step."""
        contents = {proxy.cid: _to_reply_content(result) for proxy, result in results}
        metrics = self._aggregate_replies(
            server_round, self._make_replies(contents, failures)
        )
        return _to_parameters(self._arrays), _to_scalars(metrics or {})

    def _aggregate_replies(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        arrays, metrics = self.strategy.aggregate_train(server_round, replies)
        self._arrays = self._arrays if arrays is None else arrays
        if server_round == self._left:
            self._finish_run()
        return metrics

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Return the instructions of clients that evaluate the model, if any."""
        if self._ended and server_round != self._left:
            return []
        config = _make_config(self.evaluate_config, server_round)
        messages = self.strategy.configure_evaluate(
            server_round, self._arrays, config, ClientManagerGrid(client_manager)
        )
        return [
            (proxy, EvaluateIns(_to_parameters(arrays), config))
            for proxy, arrays, config in self._list_instructions(
                messages, client_manager
            )
        ]

    def aggregate_evaluate(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, EvaluateRes]],
        failures: Sequence[tuple[ClientProxy, EvaluateRes] | BaseException],
    ) -> tuple[float | None, dict[str, Scalar]]:
        """Aggregate what the clients report about the model."""
        replies = {
            proxy.cid: RecordDict(
                {"metrics": _to_metrics({**result.metrics, "loss": result.loss})}
            )
            for proxy, result in results
        }
        found = self.strategy.aggregate_evaluate(
            server_round, self._make_replies(replies, failures)
        )
        metrics = _to_scalars(found or {})
        loss = metrics.pop("loss", None)
        return (None if loss is None else float(loss)), metrics

    def evaluate(
        self, server_round: int, parameters: Parameters
    ) -> tuple[float, dict[str, Scalar]] | None:
        """Evaluate the model on the server, if there is an `evaluate_fn`."""
        if self.evaluate_fn is None:
            return None
        return self.evaluate_fn(server_round, parameters_to_ndarrays(parameters), {})

    def _finish_run(self) -> None:
        self._ended = True
        if self.num_rounds is not None:
            self._arrays = self.strategy.run.finish()

    def _list_instructions(
        self, messages: Sequence[Message], client_manager: ClientManager
    ) -> Iterator[tuple[ClientProxy, ArrayRecord, dict[str, Scalar]]]:
        """Yield proxy, arrays and config of each message, and remember the messages."""
        proxies = client_manager.all()
        self._asked = {}
        for message in messages:
            cid = str(message.metadata.dst_node_id)
            set_message_id(message, f"asked-{cid}")
            self._asked[cid] = message
            (arrays,) = message.content.array_records.values()
            (config,) = message.content.config_records.values()
            yield proxies[cid], arrays, dict(config)  # type: ignore[arg-type]

    def _make_replies(
        self,
        contents: Mapping[str, RecordDict],
        failures: Sequence[tuple[ClientProxy, object] | BaseException],
    ) -> Iterator[Message]:
        """Yield results as replies; of failures only the number is known."""
        errors = [str(f if isinstance(f, BaseException) else f[0]) for f in failures]
        for cid, message in self._asked.items():
            if cid in contents:
                yield Message(contents[cid], reply_to=message)
            elif errors:
                code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
                yield Message(Error(code, errors.pop(0)), reply_to=message)


def _make_config(config_fn: ConfigFn | None, server_round: int) -> ConfigRecord:
    return ConfigRecord({**config_fn(server_round)} if config_fn else {})


def _to_record(parameters: Parameters) -> ArrayRecord:
    """Return arrays named by number, as a NumPyClient has them."""
    return ArrayRecord(parameters_to_ndarrays(parameters))


def _to_parameters(arrays: ArrayRecord) -> Parameters:
    return Parameters([array.data for array in arrays.values()], NUMPY)


def _to_reply_content(result: FitRes) -> RecordDict:
    """Return the records of a client's result, for screening."""
    sent = result.parameters
    arrays = {
        str(i): make_array_unchecked("", (), data)
        for i, data in enumerate(sent.tensors if sent.tensor_type == NUMPY else ())
    }
    metrics = _to_metrics(result.metrics)
    if MOMENTUM_TAG in result.metrics:
        metrics[MOMENTUM_TAG] = 1
    return RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})


def _to_metrics(metrics: Mapping[str, object]) -> MetricRecord:
    return MetricRecord(
        {
            str(name): value
            for name, value in metrics.items()
            if isinstance(value, float)
            or (isinstance(value, int) and abs(value) < 2**63)
        }
    )


def _to_scalars(metrics: Mapping[str, object]) -> dict[str, Scalar]:
    """Return metrics for the legacy API: lists become text."""
    return {
        name: value if isinstance(value, int | float) else str(value)
        for name, value in metrics.items()
    }

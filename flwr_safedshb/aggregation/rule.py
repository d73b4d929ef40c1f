"""What every aggregation rule is: f of n vectors may be hostile, one vector comes out.

A rule is called with an (n, d) array, or with n lists of layers as Flower clients send
them. Rules that depend on distances alone (`GramRule`) answer with weights from the
Gram matrix; rules that work coordinate by coordinate (`CoordinatewiseRule`) reduce
blocks of coordinates. Neither makes a second copy of the vectors.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Literal, ParamSpec, TypeVar, overload

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from flwr_safedshb.aggregation.gram import (
    Clients,
    FloatArray,
    blocks,
    careful_gram,
    check_gram,
    weighted_sum,
)
from flwr_safedshb.theory import check_num_malicious

__all__ = [
    "CoordinatewiseRule",
    "Floats",
    "GramRule",
    "Notion",
    "Rule",
    "Weighing",
    "check_gram",
    "check_positive",
    "check_vectors",
    "single_threaded",
]

Floats = NDArray[np.floating]
Notion = Literal["spectral", "variance", "spectral bound"]
P = ParamSpec("P")
R = TypeVar("R")

# Vectors of which all that is done with their Gram matrix takes no time.
_TINY = 16


@dataclass(frozen=True)
class Weighing:
    """What a rule made of a Gram matrix.

    Attributes
    ----------
    weights : (n,) array
        At least 0, sum 1; the output is the weighted sum of the vectors.
    subset : sorted index array or None
        The vectors averaged, for rules that average a subset.
    lambda_max : float
        Largest eigenvalue of the covariance of the vectors under `weights`.
    lower_bound : float or None
        Proven lower bound on what the rule minimises, if it is lambda_max (SMEA).
    kappa : float or None
        Certified constant of this very answer, in the rule's `notion`; infinity if
        nothing is proven for it.
    """

    weights: FloatArray
    subset: NDArray[np.intp] | None
    lambda_max: float
    lower_bound: float | None = None
    kappa: float | None = None


class Rule(ABC):
    """An aggregation rule."""

    @property
    def notion(self) -> Notion:
        """In which sense `kappa` holds: see `flwr_safedshb.theory`.

        "spectral bound" is Filter's, relative to the bound that it was given.
        """
        return "variance"

    @overload
    def __call__(self, vectors: Floats, f: int) -> Floats: ...
    @overload
    def __call__(self, vectors: Clients, f: int) -> list[Floats]: ...
    def __call__(self, vectors: Floats | Clients, f: int) -> Floats | list[Floats]:
        """Aggregate vectors of which at most f are hostile.

        Parameters
        ----------
        vectors : (n, d) array, or n lists of layers
        f : int
            Number of hostile vectors to withstand, 2f < n.

        Returns
        -------
        (d,) array, or list of layers, in the dtype of the input
        """
        stacked = isinstance(vectors, np.ndarray)
        clients = check_vectors(vectors, f)
        layers, _ = self.aggregate(clients, f)
        return layers[0] if stacked else layers

    @abstractmethod
    def aggregate(
        self, clients: Clients, f: int
    ) -> tuple[list[Floats], Weighing | None]:
        """Aggregate checked clients; see `check_vectors`."""

    def kappa(self, n: int, f: int) -> float | None:
        """Return the proven constant of the rule in its `notion`, None without one."""
        check_num_malicious(n, f)
        return None

    def paper_kappa(self, n: int, f: int) -> float | None:
        """Return the constant that the paper (see `theory`) states, None without one.

        In the same `notion`; ours, `kappa`, is never larger.
        """
        check_num_malicious(n, f)
        return None


class GramRule(Rule):
    """A rule that needs inner products only."""

    @abstractmethod
    def weigh(self, gram: FloatArray, f: int) -> Weighing:
        """Return the weights of the vectors whose Gram matrix, (n, n), is given."""

    def weigh_many(self, grams: FloatArray, f: int) -> FloatArray:
        """Return the weights, (g, n), for each of g Gram matrices, (g, n, n)."""
        return np.array([self.weigh(gram, f).weights for gram in grams])

    def aggregate(
        self, clients: Clients, f: int
    ) -> tuple[list[Floats], Weighing | None]:
        """Aggregate by Gram matrix, weights, weighted sum."""
        weighing = self.weigh(careful_gram(clients, f), f)
        return weighted_sum(clients, weighing.weights), weighing


@lru_cache(maxsize=1)
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


def single_threaded(function: Callable[P, R]) -> Callable[P, R]:
    """Run a method of a Gram matrix on one BLAS thread.

    Small eigenproblems are far slower on two. Tiny ones are on one anyway, and to see
    to it would cost them more than they take.
    """

    @wraps(function)
    def limited(*args: P.args, **kwargs: P.kwargs) -> R:
        gram = args[1] if len(args) > 1 else None
        if isinstance(gram, np.ndarray) and gram.shape[-1] <= _TINY:
            return function(*args, **kwargs)
        with _controller().limit(limits=1, user_api="blas"):
            return function(*args, **kwargs)

    return limited


class CoordinatewiseRule(Rule):
    """A rule that works on each coordinate alone."""

    @abstractmethod
    def reduce(self, block: FloatArray, f: int) -> FloatArray:
        """Reduce a block, (n, k), to (k,); the block may be overwritten."""

    def aggregate(self, clients: Clients, f: int) -> tuple[list[Floats], None]:
        """Aggregate block by block."""
        return self.reduce_blocks(clients, f, None), None

    def reduce_blocks(
        self, clients: Clients, f: int, mixing: FloatArray | None
    ) -> list[Floats]:
        """Reduce all coordinates, of the rows of `mixing` @ vectors where given."""
        result = [np.empty_like(layer, order="C") for layer in clients[0]]
        flat = [layer.reshape(-1) for layer in result]
        for layer, span, block in blocks(clients):
            mixed = block if mixing is None else mixing @ block
            flat[layer][span] = self.reduce(mixed, f)
        return result


def check_vectors(vectors: Floats | Clients, f: int) -> Clients:
    """Return the vectors as n lists of layers, or raise a ValueError that says why not.

    Refuses f < 0, 2f >= n, empty, ragged, non-numeric and non-finite input.
    """
    if isinstance(vectors, np.ndarray):
        if vectors.ndim != 2:
            raise ValueError(
                f"vectors has shape {vectors.shape}; give an (n, d) array, one row "
                "for each client, or n lists of layers"
            )
        vectors = [[row] for row in vectors]
    check_num_malicious(len(vectors), f)
    clients = [[_float_layer(layer) for layer in client] for client in vectors]
    shapes = [[layer.shape for layer in client] for client in clients]
    if not sum(layer.size for layer in clients[0]):
        raise ValueError("vectors[0] is empty; every client needs a coordinate or more")
    for i, (client, shape) in enumerate(zip(clients, shapes, strict=True)):
        if shape != shapes[0]:
            raise ValueError(
                f"vectors[{i}] has layers of shapes {shape}, vectors[0] has "
                f"{shapes[0]}; give every client the same layers"
            )
        for j, layer in enumerate(client):
            if not _finite(layer):
                raise ValueError(
                    f"vectors[{i}] holds NaN or infinity in layer {j}; exclude that "
                    "client and lower f by one"
                )
    return clients


def check_positive(name: str, value: float) -> None:
    """Refuse what is not finite and above 0."""
    if not 0.0 < value < np.inf:
        raise ValueError(f"{name}={value} must be finite and above 0")


def _float_layer(layer: NDArray[np.generic]) -> Floats:
    array = np.asarray(layer)
    if np.issubdtype(array.dtype, np.floating):
        return array
    if np.issubdtype(array.dtype, np.integer) or array.dtype == np.bool_:
        return array.astype(np.float64)
    raise ValueError(f"layers of dtype {array.dtype}; give real numbers")


def _finite(layer: Floats) -> bool:
    # A sum of squares is finite only if every value is, and BLAS is fast at it; where
    # it is not, huge values may have overflowed, so look at each.
    flat = np.ravel(layer)
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.vdot(flat, flat)
    return bool(np.isfinite(total)) or bool(np.isfinite(flat).all())

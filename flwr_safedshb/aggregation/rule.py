"""What every aggregation rule is: f of n vectors may be hostile, one vector comes out.

A rule is called with an (n, d) array, or with n lists of layers as Flower clients send
them. Rules that depend on distances alone (`gram.GramRule`) answer with weights from
the Gram matrix; rules that work coordinate by coordinate
(`coordinatewise.CoordinatewiseRule`) reduce blocks of coordinates. Neither makes a
second copy of the vectors.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.theory import check_num_malicious

FloatArray = NDArray[np.float64]
Floats = NDArray[np.floating]
Layers = Sequence[Floats]
Clients = Sequence[Layers]
KappaKind = Literal["spectral", "variance", "spectral bound"]


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
        Certified constant of this very answer, in the rule's `kappa_kind`; infinity if
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
    def kappa_kind(self) -> KappaKind:
        """The spread that `kappa` multiplies: see `flwr_safedshb.theory`.

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
        """Return the proven constant in the rule's `kappa_kind`, None without one."""
        check_num_malicious(n, f)
        return None

    def paper_kappa(self, n: int, f: int) -> float | None:
        """Return the constant that the paper (see `theory`) states, None without one.

        In the same `kappa_kind`; ours, `kappa`, is never larger.
        """
        check_num_malicious(n, f)
        return None


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
    clients = [[_as_floats(layer) for layer in client] for client in vectors]
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
            if not _is_finite(layer):
                raise ValueError(
                    f"vectors[{i}] holds NaN or infinity in layer {j}; exclude that "
                    "client and lower f by one"
                )
    return clients


def check_positive(name: str, value: float) -> None:
    """Refuse what is not finite and above 0."""
    if not 0.0 < value < np.inf:
        raise ValueError(f"{name}={value} must be finite and above 0")


def _as_floats(layer: NDArray[np.generic]) -> Floats:
    array = np.asarray(layer)
    if np.issubdtype(array.dtype, np.floating):
        return array
    if np.issubdtype(array.dtype, np.integer) or array.dtype == np.bool_:
        return array.astype(np.float64)
    raise ValueError(f"layers of dtype {array.dtype}; give real numbers")


def _is_finite(layer: Floats) -> bool:
    # A sum of squares is finite only if every value is, and BLAS is fast at it; where
    # it is not, huge values may have overflowed, so look at each.
    flat = np.ravel(layer)
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.vdot(flat, flat)
    return bool(np.isfinite(total)) or bool(np.isfinite(flat).all())

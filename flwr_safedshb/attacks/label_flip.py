"""Attacks on data: adversaries run the honest protocol on examples they changed."""

from dataclasses import dataclass
from typing import ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.aggregation.rule import FloatArray
from flwr_safedshb.attacks.base import Aggregate, Attack


@dataclass(frozen=True)
class LabelFlip(Attack):
    """Train on flipped labels: label l becomes (number of classes) - 1 - l.

    For two classes that is 1 - l, as in the paper. The adversaries' replies are what
    the honest protocol makes of such data, so they are left as they are.
    """

    replaces_vectors: ClassVar[bool] = False

    def flip(
        self, labels: NDArray[np.generic], num_classes: int = 2
    ) -> NDArray[np.generic]:
        """Return the labels that the adversaries train on.

        Parameters
        ----------
        labels : array of 0 ... num_classes - 1, any shape and real dtype
        num_classes : int

        Returns
        -------
        array of the same shape and dtype
        """
        if num_classes < 2:
            raise ValueError(f"num_classes={num_classes} must be at least 2")
        values = labels.astype(np.float64)
        whole = (values == np.floor(values)) & (values >= 0) & (values < num_classes)
        if not whole.all():
            raise ValueError(
                f"labels holds {values[~whole][0]}; give whole numbers from 0 to "
                f"{num_classes - 1}, or raise num_classes"
            )
        return (num_classes - 1 - values).astype(labels.dtype)

    def craft_vectors(
        self, honest: FloatArray, f: int, rng: np.random.Generator, aggregate: Aggregate
    ) -> NoReturn:
        """Refuse: what is sent follows from the adversaries' data alone."""
        raise TypeError(
            "LabelFlip changes data, not vectors; let the adversaries train on "
            "flip(labels) and send what they get"
        )

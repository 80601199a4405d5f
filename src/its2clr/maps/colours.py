"""The colours of a map: one fixed scale from 0 to 1, transparent below a threshold."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from its2clr.errors import InputError

SCALE = "viridis"
"""Of even steps to the eye, also to colour-blind ones; yellow is high, as in the paper's figure 3."""

VISIBLE = 0.2
"""Probability below which a map is transparent, as in the paper's figure 3."""


def check_threshold(threshold: float) -> None:
    """Refuse a threshold that is no probability.

    Raises:
        InputError: If it is not between 0 and 1.
    """
    if not 0 <= threshold <= 1:
        raise InputError(f"threshold is a probability from 0 to 1, got {threshold:g}")


def colour(probability: NDArray[np.float64], threshold: float) -> NDArray[np.uint8]:
    """Colours of probabilities.

    Args:
        probability: (...) values from 0 to 1, NaN for none.
        threshold: Below it, and where there is none, nothing is seen.

    Returns:
        (..., 4) RGBA, opaque or (0, 0, 0, 0).
    """
    with np.errstate(invalid="ignore"):
        visible = probability >= threshold
    number = 1 + np.rint(np.where(visible, probability, 0) * 255).astype(np.int64)
    colours: NDArray[np.uint8] = _table()[number * visible]
    return colours


@cache
def _table() -> NDArray[np.uint8]:
    """Nothing, and then the 256 colours of the scale."""
    import matplotlib as mpl

    colours: NDArray[np.uint8] = mpl.colormaps[SCALE](np.arange(256), bytes=True)
    return np.concatenate([np.zeros((1, 4), np.uint8), colours])

"""Microns per pixel: what is asked for, and what a slide has. Nothing is ever guessed."""

import math

from its2clr.cohort.slides.slide_image import SlideProblem
from its2clr.errors import InputError

SMALLEST_MPP, LARGEST_MPP = 0.05, 10.0
"""What a microscope can have; 1200 dots per inch, a screen's 72 dpi and the like fall outside."""

_MPP_TIMES_MAGNIFICATION = 10.0
_MOST_UNEQUAL = 1.05


def target_mpp(magnification: float | None, mpp: float | None) -> float:
    """The microns per pixel of the tiles: `mpp`, or 10 / `magnification` (5x is 2 um/px).

    Raises:
        InputError: If not exactly one of them is given, or it is out of range.
    """
    if (magnification is None) == (mpp is None):
        raise InputError("give the scale of the tiles as either --magnification or --mpp")
    if magnification is not None and not (math.isfinite(magnification) and magnification > 0):
        raise InputError(f"magnification must be above 0, got {magnification:g}")
    asked = mpp if mpp is not None else _MPP_TIMES_MAGNIFICATION / (magnification or math.nan)
    if not (math.isfinite(asked) and 0 < asked <= 100):
        raise InputError(f"mpp must be above 0 and at most 100 um/px, got {asked:g}")
    return asked


def is_sane(mpp: float) -> bool:
    """Whether this can be the scale of a slide at level 0."""
    return SMALLEST_MPP <= mpp <= LARGEST_MPP


def check_mpp(mpp: float, name: str) -> None:
    """Check a scale that a person gave.

    Raises:
        InputError: If it cannot be right.
    """
    if not is_sane(mpp):
        raise InputError(f"{name} is {mpp:g} um/px, expected {SMALLEST_MPP:g} to {LARGEST_MPP:g}")


def slide_mpp(found: tuple[float, float] | None, given: float | None, default: float | None) -> float:
    """The scale of level 0: from the file if it is sane, else of the manifest, else the default.

    Args:
        found: What the file says in x and y, None if nothing.
        given: What the manifest says.
        default: What to use without either.

    Raises:
        SlideProblem: If none of them says, or pixels are not square.
    """
    if found is not None and is_sane(found[0]) and is_sane(found[1]):
        if max(found) > _MOST_UNEQUAL * min(found):
            raise SlideProblem(f"pixels are not square: {found[0]:g} by {found[1]:g} um")
        return (found[0] + found[1]) / 2
    for mpp in (given, default):
        if mpp is not None:
            return mpp
    reason = "the file does not say" if found is None else f"the file says {found[0]:g} um/px, which cannot be"
    raise SlideProblem(f"the scale is unknown: {reason}; give column mpp in the manifest, or --default-mpp")

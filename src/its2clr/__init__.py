"""its2clr: instance representations, bag predictions and maps from bag labels alone."""

from importlib import import_module
from typing import TYPE_CHECKING

from its2clr.version import __version__

if TYPE_CHECKING:
    from its2clr.cohort import Cohort
    from its2clr.crossval import cross_validate
    from its2clr.estimator import ItS2CLR

__all__ = ["Cohort", "ItS2CLR", "__version__", "cross_validate"]

_HOMES = {"Cohort": "its2clr.cohort", "ItS2CLR": "its2clr.estimator", "cross_validate": "its2clr.crossval"}


def __getattr__(name: str) -> object:
    """Import a name when it is first asked for: `its2clr --help` needs none of what they need."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Also the names that are imported when they are first asked for."""
    return sorted({*globals(), *_HOMES})

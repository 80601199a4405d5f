"""its2clr: instance representations, bag predictions and maps from bag labels alone."""

from typing import TYPE_CHECKING

from its2clr.version import __version__

if TYPE_CHECKING:
    from its2clr.estimator import ItS2CLR

__all__ = ["ItS2CLR", "__version__"]


def __getattr__(name: str) -> object:
    """Import `ItS2CLR` when it is first asked for: `its2clr --help` needs none of what it needs."""
    if name == "ItS2CLR":
        from its2clr.estimator import ItS2CLR

        return ItS2CLR
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Pieces of text that many messages share: a hint at the word that was meant, short lists, readable sizes."""

import difflib
from collections.abc import Iterable, Sequence


def did_you_mean(word: str, known: Iterable[str], *, else_list: bool = False) -> str:
    """A hint to append to "unknown word": the known word most like it.

    Args:
        word: What was written, in any case of letters.
        known: What could have been written.
        else_list: Whether to list all known words where none is like it.

    Returns:
        `, did you mean 'epochs'?`; or ` (known: ...)`; or nothing.

    Example:
        >>> did_you_mean("epoch", ["epochs", "seed"])
        ", did you mean 'epochs'?"
    """
    spelled = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), spelled, n=1, cutoff=0.5)
    if close:
        return f", did you mean {spelled[close[0]]!r}?"
    return f" (known: {', '.join(spelled.values())})" if else_list else ""


def shortened(items: Sequence[object], most: int = 10) -> str:
    """The first items of a list, and how many more there are.

    Example:
        >>> shortened(["a", "b", "c"], most=2)
        'a, b and 1 more'
    """
    return ", ".join(map(str, items[:most])) + (f" and {len(items) - most} more" if len(items) > most else "")


def shortened_lines(lines: Sequence[str], most: int = 10, more: str = "more") -> list[str]:
    """The first lines of a list, and one that says how many more there are.

    Example:
        >>> shortened_lines(["a", "b", "c"], most=1, more="more notes")
        ['a', 'and 2 more notes']
    """
    return [*lines[:most], *([f"and {len(lines) - most} {more}"] if len(lines) > most else [])]


def readable_size(nbytes: float) -> str:
    """Bytes in the unit that fits.

    Example:
        >>> readable_size(3.2 * 2**30)
        '3.2 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"

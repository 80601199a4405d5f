"""Identifiers of bags from several places: each of its own, the same in every order, and fit to name a file."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

LONGEST = 150
"""Of the percent-encoded name; the name of the file that is made of it may be longer by what is added."""


def distinct_names(named: Sequence[tuple[str, Path]]) -> list[str]:
    """Give each bag an identifier of its own.

    Names that occur once stay. Others get as many of their folders before them as it takes to tell them apart
    (`site-a/case-1`, `site-b/case-1`), so what a bag is called does not depend on the order of the inputs.

    Args:
        named: For each bag its name, and the file or folder it comes from.
    """
    names = [_clean(name) for name, _ in named]
    deepest = max((len(path.parts) for _, path in named), default=0)
    for depth in range(1, deepest + 1):
        repeated = {name for name, count in Counter(names).items() if count > 1}
        if not repeated:
            break
        names = [
            _clean("/".join([*path.parent.parts[-depth:], name])) if now in repeated else now
            for (name, path), now in zip(named, names, strict=True)
        ]
    names = [_shortened(name) for name in names]
    counts = Counter(names)
    return [
        f"{name}~{_digest(str(path))}" if counts[name] > 1 else name
        for name, (_, path) in zip(names, named, strict=True)
    ]


def _clean(name: str) -> str:
    """Names of files may hold bytes that are no text, line ends, and blanks around them that a table loses."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() else " " for letter in text).strip() or "bag"


def _shortened(name: str) -> str:
    if len(quote(name, safe="")) <= LONGEST:
        return name
    short = name
    while len(quote(short, safe="")) > LONGEST - 9:
        short = short[:-1]
    return f"{short}~{_digest(name)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:8]

"""What commands print with, and which process prints."""

import os
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

console = Console(highlight=False)


def say(text: str) -> None:
    """Print a text as it is: no markup, no wrapping."""
    console.print(text, markup=False, soft_wrap=True)


def print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table whose cells are not broken into lines, also where the screen is narrow."""
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, width=max(console.width, 100)).print(table)


def is_first_process() -> bool:
    """Whether this process speaks for all that were started together."""
    return os.environ.get("RANK", "0") == "0"

"""What commands print with, and which process prints."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from its2clr import far

if TYPE_CHECKING:
    from its2clr.engine.progress import Progress

console = Console(highlight=False)


def say(text: str) -> None:
    """Print a text as it is: no markup, no wrapping."""
    console.print(far.spelled(text), markup=False, soft_wrap=True)


def progress(name: str, total: int, unit: str) -> "Progress":
    """A display of how far a job is, shown while the block runs."""
    from its2clr.engine.progress import ProgressBar

    return ProgressBar(console=console).start(name, total, unit)


def print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table whose cells stay on one line, even on a narrow screen."""
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, width=max(console.width, 100)).print(table)

"""What commands print with, and which process prints."""

import os

from rich.console import Console

console = Console(highlight=False)


def say(text: str) -> None:
    """Print a text as it is: no markup, no wrapping."""
    console.print(text, markup=False, soft_wrap=True)


def is_first_process() -> bool:
    """Whether this process speaks for all that were started together."""
    return os.environ.get("RANK", "0") == "0"

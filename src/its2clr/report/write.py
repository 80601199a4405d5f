"""Write the report of a run: on its own, or at the end of a training however that ends."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from its2clr.errors import InputError
from its2clr.files import write_text
from its2clr.report.state import FAILURE_FILE, note_failure

if TYPE_CHECKING:
    from its2clr.report.collect import RunFacts

REPORT_FILE = "report.html"


def write_report(run: str | Path, out: str | Path | None = None) -> Path:
    """Write one self-contained HTML page about a run in whatever state it is.

    Args:
        run: Folder of the run.
        out: Where to; None: `report.html` in the run.

    Returns:
        Where it is.

    Raises:
        InputError: The folder is no run, or the page cannot be written there.
    """
    return _write(run, out)[0]


def _write(run: str | Path, out: str | Path | None = None) -> tuple[Path, "RunFacts"]:
    # Imported here: a training that is only to be reported at its end does not wait for what draws figures.
    from its2clr.report.collect import collect
    from its2clr.report.page import render

    path = Path(run) / REPORT_FILE if out is None else Path(out)
    if path.is_dir():
        raise InputError(f"{path}: is a folder; give a file, for example {path / REPORT_FILE}")
    facts = collect(run)
    write_text(path, render(facts))
    return path, facts


@contextmanager
def reported(run: Path, say: Callable[[str], None], *, enabled: bool = True) -> Iterator[None]:
    """Write the report when the block ends, and when it fails the reason too; never fails by itself.

    Args:
        run: Folder of the run.
        say: Told where the report is, or why there is none; of a run that fails, also what is wrong with its pseudo
            labels, which a run that ends well has said by then.
        enabled: Off in processes that do not write.
    """
    if not enabled:
        yield
        return
    (run / FAILURE_FILE).unlink(missing_ok=True)
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            note_failure(run, error)
        if isinstance(error, Exception):
            _try_to_write(run, say, failed=True)
        raise
    _try_to_write(run, say)


def _try_to_write(run: Path, say: Callable[[str], None], *, failed: bool = False) -> None:
    try:
        path, facts = _write(run)
        for warning in (facts.health or {}).get("warnings", ()) if failed else ():
            say(f"warning: {warning}")
        say(f"report in {path}")
    except Exception as error:  # noqa: BLE001 - a report must not take a finished training down
        say(f"warning: no report was written ({type(error).__name__}: {error}); `its2clr report {run}` tries again")

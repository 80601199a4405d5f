"""The program `its2clr`: its commands in the order of `its2clr --help`, and how it ends."""

import io
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer

from its2clr import far
from its2clr.cli import cohort, experiments, inspection, results, training, tuning, viewing
from its2clr.cli.output import console
from its2clr.errors import Its2clrError
from its2clr.launcher import is_first_process
from its2clr.memory_limit import is_out_of_memory, said_out_of_memory, take_blas_memory
from its2clr.signals import TERMINATED, Termination
from its2clr.version import __version__

INTERRUPTED = 130
"""Exit code of a command stopped by Ctrl-C."""
UNFORESEEN = 70
"""Exit code of a command that met an error nobody foresaw (EX_SOFTWARE of sysexits.h)."""
_LONGEST_LINE = 500
GOES_ON = "the same command goes on where it stopped"
COMMANDS: dict[str, Callable[..., None]] = {
    "demo": training.demo,
    "fit": training.fit,
    "pretrain": training.pretrain,
    "extract": training.extract,
    "aggregate": training.aggregate,
    "refine": training.refine,
    "correct": training.correct,
    "end-to-end": training.end_to_end,
    "evaluate": training.evaluate,
    "tune": tuning.tune,
    "view": viewing.view,
    "reproduce": experiments.reproduce,
    "report": results.report,
    "bench": experiments.bench,
    "map": results.map_,
    "geojson": results.geojson,
    "doctor": inspection.doctor,
    "predict": results.predict,
    "score": results.score,
    "export": results.export,
    "weights": inspection.weights,
    "recipes": inspection.recipes,
}
COHORT_COMMANDS: dict[str, Callable[..., None]] = {
    "images": cohort.images,
    "slides": cohort.slides,
    "features": cohort.features,
    "synthetic": cohort.synthetic,
    "resample": cohort.resample,
}

app = typer.Typer(
    name="its2clr",
    help="Learn tile features, a bag classifier and a map of the positives from bag labels alone (ItS2CLR).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
cohort_app = typer.Typer(help="Make a cohort: one folder of packed tiles and bag labels.", no_args_is_help=True)
app.add_typer(cohort_app, name="cohort")
for name, command in COMMANDS.items():
    app.command(name)(command)
for name, command in COHORT_COMMANDS.items():
    cohort_app.command(name)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        console.print(__version__)
        raise typer.Exit


def _allow_plugins(wanted: bool) -> None:
    if wanted:
        from its2clr.plugins import allow_plugins

        allow_plugins()


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    plugins: Annotated[
        bool,
        typer.Option(
            "--allow-plugins",
            callback=_allow_plugins,
            help="Run the Python code that a recipe, run or study names as `plugins`; only if you trust who wrote it.",
        ),
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options of every command."""


def main() -> None:
    """Run the command line; an error that the user can mend is one message and exit code 2, any other exit code 70."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files may be no UTF-8
    with Termination(f"stopped by SIGTERM; {GOES_ON}\n" if is_first_process() else "") as termination:
        try:
            take_blas_memory()
            app()
        except SystemExit as stop:
            if termination.heard:
                sys.exit(TERMINATED)
            if stop.code == INTERRUPTED and is_first_process():
                _say_error(f"stopped; {GOES_ON}")
            raise
        except KeyboardInterrupt:  # a second one, while the first was being handled
            sys.exit(TERMINATED if termination.heard else INTERRUPTED)
        except Exception as error:
            ours, memory = isinstance(error, Its2clrError | OSError), is_out_of_memory(error)
            if not (ours or memory):
                _unforeseen(error)
            if _debugging():
                raise
            said = far.spelled(str(error)) if ours else said_out_of_memory(error)
            if is_first_process():
                _say_error(f"error: {said}")
            sys.exit(2)


def _say_error(text: str) -> None:
    """Not by rich, which loads more code to print: there may be no memory for that."""
    print(text, file=sys.stderr)  # noqa: T201


def _debugging() -> bool:
    return "--debug" in sys.argv


def _unforeseen(error: Exception) -> NoReturn:
    """End with one line about an error that nobody thought of; every process says its own, since others may be fine."""
    if _debugging():
        traceback.print_exception(error)
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    command = " ".join(["its2clr", *words[: 2 if words[:1] == ["cohort"] else 1]])
    text = " ".join(str(error).split())
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    said = said if len(said) <= _LONGEST_LINE else f"{said[:_LONGEST_LINE]}..."
    report = f"please report it with {'this output' if _debugging() else 'the output of `its2clr --debug ...`'}"
    _say_error(f"error: {command} met an error that nobody foresaw: {said}; {report}")
    sys.exit(UNFORESEEN)

"""The command that shows a run, predictions, or new slides in the browser."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from its2clr.cli.options import DefaultMppOption, MachineSetOption, WorkersOption
from its2clr.cli.output import say
from its2clr.errors import InputError, extra_needed
from its2clr.units import MicronsPerPixel


def view(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Folder of an evaluated run, or of what `its2clr predict` wrote; with INPUT: a model or a run.",
        ),
    ],
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[INPUT...]", help="New slides (as for `its2clr predict`) to predict and look at."),
    ] = None,
    marks: Annotated[
        Path | None, typer.Option(help="Folder for what you mark; default: RUN/corrections.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the predictions for INPUT; default: predictions/NAME.", show_default=False),
    ] = None,
    default_mpp: DefaultMppOption = None,
    workers: WorkersOption = None,
    settings: MachineSetOption = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 127.0.0.1 is this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(help="Secret that browsers must send; it is in the printed address. Default: a new one."),
    ] = None,
    open_browser: Annotated[
        bool | None, typer.Option("--open/--no-open", help="Open a browser. Default: if there is a screen.")
    ] = None,
) -> None:
    """Look at a run, at predictions or at new slides in the browser, and mark what the model got wrong.

    It opens on the most suspicious test bag: slides with heat maps or outlines, annotations, rounds, instances and
    their neighbours. What you mark is saved for `its2clr correct`. Nothing leaves this machine, and no network is
    needed. Press ? in the browser to see the keys.

    Example: `its2clr view runs/demo`

    Predictions: `its2clr view predictions/monday`. A new slide: `its2clr view runs/mine/model.its2clr case-7.svs`,
    which is `its2clr predict` and then `its2clr view` of what it wrote.

    The address it prints holds a token, without which nobody gets in, other users of this machine neither. On a server,
    best through a tunnel: `ssh -t -L 8000:localhost:8000 server its2clr view runs/mine`. To let others in:
    `its2clr view runs/mine --host 0.0.0.0`.
    """
    with extra_needed("`its2clr view`", "viewer"):
        import uvicorn  # noqa: F401 - before anything is predicted

        from its2clr.viewer.app import create_app  # noqa: F401
        from its2clr.viewer.serve import serve

    shown = folder
    if inputs:
        shown = _predicted(folder, inputs, out, default_mpp, workers, settings or [])
    elif out is not None:
        raise InputError("--out is the folder of predictions for new slides; give the slides, too")
    serve(shown, marks=marks, host=host, port=port, token=token, open_browser=open_browser, say=say)


def _predicted(
    model: Path,
    inputs: list[Path],
    out: Path | None,
    default_mpp: float | None,
    workers: int | None,
    overrides: list[str],
) -> Path:
    """The folder of predictions for new slides, made now."""
    from its2clr.predict.new_bags import predict

    more = f"-and-{len(inputs) - 1}-more" if len(inputs) > 1 else ""
    place = out or Path("predictions") / f"{inputs[0].resolve().stem}{more}"
    scale = None if default_mpp is None else MicronsPerPixel(default_mpp)
    found = predict(model, inputs, place, default_mpp=scale, workers=workers, overrides=overrides, quiet=False)
    say("\n".join(found.lines()))
    say(f"to look at them again: {shlex.join(['its2clr', 'view', str(place)])}")
    return place

"""How far a run has come: finished, going, stopped or failed, and the next command; read from its files alone."""

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from its2clr.config import RunConfig
from its2clr.engine.guard import advice, ended_stuck
from its2clr.errors import InputError
from its2clr.files import read_json, write_json
from its2clr.refine.remedies import remedies
from its2clr.run.names import END_TO_END, REFINED
from its2clr.run.results_file import read_retries

FAILURE_FILE = "failure.json"
"""Why the last `fit` of a run ended early; removed when the next one starts."""
BY_KEYBOARD = "it was stopped from the keyboard"
FRESH_SECONDS = 120.0
"""A run that wrote something within these seconds may still be at work."""
StateName = Literal["evaluated", "outdated", "trained", "going", "stopped", "failed", "begun"]


@dataclass(frozen=True)
class State:
    """How far a run has come.

    Attributes:
        name: One word for it.
        words: A sentence for the person.
        command: What to run next; None when there is nothing left to do.
        error: Why it stopped, where that is known.
        stages: Every finished stage with what it noted.
    """

    name: StateName
    words: str
    command: str | None
    error: str | None
    stages: dict[str, dict[str, Any]]


def state_of(run: Path, config: RunConfig, metrics: Sequence[dict[str, Any]]) -> State:
    """Look at a run's files.

    Args:
        run: Folder of the run.
        config: Its settings.
        metrics: What it logged.
    """
    stages = finished_stages(run)
    error = read_failure(run)
    collapse = collapsed(metrics, stages, retries_left=len(read_retries(run)) < len(remedies(config.refine)))
    folder = shlex.quote(str(run))
    reached = _reached(config, metrics, stages)
    again = f"its2clr {_training_command(metrics)} --out {folder}"
    if being_trained(run):
        words = f"Being trained now: {reached}. This report shows what was there when it was made."
        return State("going", words, f"its2clr report {folder}", None, stages)
    if (run / "results.json").is_file() and "evaluate" in stages:
        return _evaluated(config, stages, folder)
    if error is not None or collapse is not None:
        ended: StateName = "stopped" if error == BY_KEYBOARD else "failed"
        return State(ended, f"Stopped early: {reached}.", None if collapse else again, error or collapse, stages)
    if {f"aggregate {REFINED}", f"aggregate {END_TO_END}"} & stages.keys():
        return State("trained", "Trained, not measured yet.", f"its2clr evaluate {folder}", None, stages)
    age = time.time() - last_written(run)
    name: StateName
    if not metrics and not stages:
        name, words = "begun", "Begun; no epoch of training is finished yet."
    elif age < FRESH_SECONDS:
        name = "going"
        words = f"Not finished: {reached}. It wrote something {age:.0f} seconds ago, so it may be at work."
    else:
        name, words = "stopped", f"Not finished: {reached}. It last wrote something {said_age(age)} ago."
    return State(name, words, again, None, stages)


def _evaluated(config: RunConfig, stages: dict[str, dict[str, Any]], folder: str) -> State:
    missing = _trained_since(config, stages)
    if not missing:
        return State("evaluated", "Trained and measured on the test bags.", None, None, stages)
    words = f"Measured on the test bags before this was trained: {', '.join(missing)}."
    return State("outdated", words, f"its2clr evaluate {folder}", None, stages)


def _training_command(metrics: Sequence[dict[str, Any]]) -> str:
    """The command that trained so far."""
    stages = {entry["stage"] for entry in metrics}
    return "end-to-end" if "end_to_end" in stages and not stages & {"refine", "round"} else "fit"


def finished_stages(run: Path) -> dict[str, dict[str, Any]]:
    """The finished stages in `state.json`; none if there is no such file.

    Raises:
        InputError: The file is damaged.
    """
    path = run / "state.json"
    if not path.is_file():
        return {}
    try:
        stages: dict[str, dict[str, Any]] = read_json(path)["stages"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: damaged, cannot be read ({error})") from error
    return stages


def note_failure(run: Path, error: BaseException) -> None:
    """Leave in the run why its training ended early."""
    stopped = isinstance(error, KeyboardInterrupt)
    message = BY_KEYBOARD if stopped else str(error) or type(error).__name__
    write_json(run / FAILURE_FILE, {"error": message, "when": datetime.now(UTC).isoformat(timespec="seconds")})


def read_failure(run: Path) -> str | None:
    """Why the run's training ended early; None if nothing says so, or if it was trained further since."""
    note, metrics = run / FAILURE_FILE, run / "metrics.jsonl"
    try:
        if metrics.is_file() and metrics.stat().st_mtime > note.stat().st_mtime:
            return None
        return str(read_json(note)["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def being_trained(run: Path) -> bool:
    """Whether a process on this machine holds the run's lock; it is not taken here, so no training has to wait."""
    locks = Path("/proc/locks")
    if not ((run / ".lock").is_file() and locks.is_file()):
        return False
    inode = f":{(run / '.lock').stat().st_ino}"
    return any(
        len(words) > 5 and words[1] == "FLOCK" and words[5].endswith(inode)
        for words in map(str.split, locks.read_text(encoding="utf-8").splitlines())
    )


def last_written(run: Path) -> float:
    """When training last wrote something into the run, in seconds of the epoch."""
    paths = [run / "metrics.jsonl", run / "state.json", run / "config.yaml", *run.glob("checkpoints/*.safetensors")]
    return max((path.stat().st_mtime for path in paths if path.is_file()), default=0.0)


def said_age(seconds: float) -> str:
    """Seconds in the unit that fits: `3 hours`."""
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def collapsed(metrics: Sequence[dict[str, Any]], stages: dict[str, Any], *, retries_left: bool) -> str | None:
    """What to do if an unfinished contrastive stage ended collapsed or stuck; None if none did.

    Args:
        metrics: What the run logged.
        stages: Its finished stages.
        retries_left: Whether its refinement would try something else when it continues; then it is not lost.
    """
    for stage in ("pretrain", *(() if retries_left else ("refine",))):
        if stage not in stages and ended_stuck(stage, metrics):
            last = [entry for entry in metrics if entry["stage"] == stage][-1]
            return (
                f"{stage}: the representation collapsed to one point (its loss is {last['loss']:.3f}, as of a single "
                f"point, and its spread {last['spread']:.4f}). {advice(stage)}. Use a new run folder."
            )
    return None


def _reached(config: RunConfig, metrics: Sequence[dict[str, Any]], stages: dict[str, Any]) -> str:
    epochs = {
        "pretrain": config.pretrain.epochs,
        "refine": config.refine.epochs,
        "round": config.refine.epochs,
        "end_to_end": config.end_to_end.epochs,
    }
    if not metrics:
        return f"{len(stages)} stages are finished" if stages else "no epoch is finished"
    stage, epoch = metrics[-1]["stage"], metrics[-1]["epoch"]
    stage = stage.removesuffix("_check")
    name = {"round": "refine", "end_to_end": "end to end"}.get(stage, stage)
    return f"{name} has done {epoch} of {epochs.get(stage, epoch)} epochs"


def _trained_since(config: RunConfig, stages: dict[str, dict[str, Any]]) -> list[str]:
    """Pairs of encoder and aggregator that were trained after the run was measured."""
    measured = set(stages["evaluate"].get("models", ()))
    pairs = []
    for stage in stages:
        words = stage.split(" ")
        if words[0] == "aggregate":
            pairs.append(f"{words[1]} {words[2] if len(words) > 2 else config.aggregator.name}")
    return [pair for pair in pairs if pair not in measured]

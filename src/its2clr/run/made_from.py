"""What the results of a run were made from: its cohort as it was when the run began, and the weights of its models."""

import hashlib
from pathlib import Path
from typing import Any

from its2clr.cohort import Cohort
from its2clr.cohort.identity import Identity, only_test_labels, said_changes
from its2clr.config import RunConfig
from its2clr.errors import InputError
from its2clr.files import damage_said, hash_files, read_json
from its2clr.run.names import aggregator_path, encoder_file

MADE_FROM_FILE = "made_from.json"
"""The identity of the cohort when the run began; a run of an older version has none."""


def read_made_from(run: Path) -> Identity | None:
    """The cohort of a run as it was when the run began; None if the run does not say.

    Raises:
        InputError: The file is damaged.
    """
    path = run / MADE_FROM_FILE
    if not path.is_file():
        return None
    try:
        return Identity.from_dict(read_json(path))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: damaged, cannot be read ({error}); copy the run again") from error


def feature_maker(run: Path, config: RunConfig, encoder: str) -> str:
    """What feature files say they were made with: network, encoder, and a hash of its weights."""
    return f"{config.encoder.name} {encoder} {hash_files(encoder_file(run, encoder))}"


def model_digest(run: Path, config: RunConfig, encoder: str, aggregator: str) -> str:
    """A hash of the weights of an encoder and its aggregators; empty if they are not there any more.

    Raises:
        InputError: One of the files is damaged.
    """
    other = None if aggregator == config.aggregator.name else aggregator
    files = encoder_file(run, encoder), aggregator_path(run, encoder, other)
    return _hash_weights(*files) if all(file.is_file() for file in files) else ""


def _hash_weights(*files: Path) -> str:
    """Short hash of the tensors in some files; what else a file notes does not count."""
    from safetensors import safe_open

    digest = hashlib.sha256()
    for file in files:
        damaged = damage_said(f"{file}: not a safetensors file, or incomplete", "copy the run again")
        with damaged, safe_open(file, framework="numpy") as opened:
            for name in sorted(opened.keys()):
                tensor = opened.get_tensor(name)
                digest.update(f"{name} {tensor.shape} {tensor.dtype}".encode())
                digest.update(tensor.tobytes())
    return digest.hexdigest()[:16]


def changed_models(run: Path, config: RunConfig, results: dict[str, Any]) -> list[str]:
    """Models whose weights are not those that were evaluated; ones that were removed do not count."""
    found = []
    for name, digest in results.get("made_from", {}).get("models", {}).items():
        now = model_digest(run, config, *name.split(" ", 1))
        if now and now != digest:
            found.append(name)
    return found


def outdated(run: Path, config: RunConfig, results: dict[str, Any], cohort: Cohort) -> list[str]:
    """What has changed since a run was evaluated, in sentences; empty if its results are still true.

    Args:
        run: Folder of the run.
        config: Its settings.
        results: The content of `results.json`.
        cohort: Its whole cohort, as it is now.
    """
    before, known = read_made_from(run), results.get("made_from")
    if before is None or known is None:  # of an older version, which did not record it
        return []
    lines = [f"{name}: its weights are not those that were evaluated" for name in changed_models(run, config, results)]
    now = cohort.identity()
    if now.digest != known["cohort"]:
        changes = now.changes_since(before)
        again = f"run `its2clr evaluate {run}` again" if only_test_labels(changes) else "train a new run"
        words = "; ".join(said_changes(changes)) or "labels of test bags are again as the run began with"
        lines.append(f"the cohort {cohort.path} is not the one that was evaluated ({words}): restore it, or {again}")
    return lines

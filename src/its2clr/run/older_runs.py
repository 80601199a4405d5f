"""Runs of older versions are brought up to date in place: files, tables and settings get the names they have now.

Every step may be repeated, so an upgrade that was killed goes on when the run is next opened.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from its2clr.errors import InputError
from its2clr.files import atomic_path, read_json, write_json, write_text

ENCODERS = {"simclr": "start", "its2clr": "refined"}
"""What encoders were called, and are now."""
_CHECKPOINTS = (
    (r"encoder-simclr", "encoder-start"),
    (r"encoder-its2clr", "encoder-refined"),
    (r"(pretrain|refine)-candidate-(\d+)", r"\1-best-encoder-\2"),
    (r"end_to_end-(encoder|aggregator)-(\d+)", r"end_to_end-best-\1-\2"),
)
_REMOVED = {"selection": "bag_auc", "tolerance": 0.0}
"""Settings of `refine` that no longer exist, with what they were when nobody set them."""


def upgrade(run: Path) -> None:
    """Bring a run up to date, if it is one of an older version.

    Raises:
        InputError: Its folder cannot be written to, or its refinement was begun with a setting that no longer exists.
    """
    if not _is_older(run):
        return
    try:
        with _locked(run):
            _upgrade_config(run)
            _rename_files(run)
            _rename_in_tables(run)
            _rename_in_state(run)
    except OSError as error:
        raise InputError(
            f"{run}: a run of an older version of its2clr, which has to be brought up to date and cannot be written "
            f"({error}); copy it to where you may write"
        ) from error


def _is_older(run: Path) -> bool:
    state, config = (
        path.read_text("utf-8", errors="replace") if path.is_file() else ""  # who reads all of it says what is damaged
        for path in (run / "state.json", run / "config.yaml")
    )
    if re.search(r'"aggregate (simclr|its2clr)|"(simclr|its2clr) ', state):
        return True
    if re.search(r"^  (selection|tolerance):|instance_dropout|encoder-(simclr|its2clr)", config, re.MULTILINE):
        return True
    return any((run / "checkpoints" / f"encoder-{name}.safetensors").is_file() for name in ENCODERS)


@contextmanager
def _locked(run: Path) -> Iterator[None]:
    """One process at a time: those of torchrun all open the run."""
    with (run / ".upgrade").open("w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):  # no such locks here
            pass
        yield
    (run / ".upgrade").unlink(missing_ok=True)


def _upgrade_config(run: Path) -> None:
    path = run / "config.yaml"
    config: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    refine = config.get("refine", {})
    finished = "refine" in _state(run).get("stages", {})
    for name, usual in _REMOVED.items():
        value = refine.pop(name, usual)
        if value != usual and not finished and (run / "checkpoints" / "refine.safetensors").is_file():
            raise InputError(
                f"{run}: this refinement was begun with refine.{name}={value}, which no longer exists; begin a new run "
                "folder, with --set pretrain.start=RUN to keep the start"
            )
    for aggregator in (config.get("aggregator"), refine.get("reader")):
        if aggregator:
            aggregator.get("options", {}).pop("instance_dropout", None)
    if config.get("pretrain", {}).get("start"):
        config["pretrain"]["start"] = _renamed_file(config["pretrain"]["start"])
    write_text(path, yaml.safe_dump(config, sort_keys=False))


def _rename_files(run: Path) -> None:
    for path in run.glob("checkpoints/*.safetensors"):
        if (name := _renamed_file(path.name)) != path.name:
            path.rename(path.with_name(name))
    for old, new in ENCODERS.items():
        for path in run.glob(f"aggregators/{old}*.safetensors"):
            if path.stem == old or path.stem.startswith(f"{old}-"):
                path.rename(path.with_name(new + path.name.removeprefix(old)))
        if (run / "features" / old).is_dir() and not (run / "features" / new).exists():
            (run / "features" / old).rename(run / "features" / new)


def _renamed_file(name: str) -> str:
    for old, new in _CHECKPOINTS:
        name = re.sub(rf"{old}(?=\.safetensors$)", new, name)
    return re.sub(r"-best-(\w+)-(\d{1,3})(?=\.safetensors$)", lambda m: f"-best-{m[1]}-{int(m[2]):04d}", name)


def _rename_in_tables(run: Path) -> None:
    """A damaged table stays as it is: who wants to read it says so."""
    for rename in (_rename_results, _rename_bag_predictions, _rename_predictions):
        with suppress(ValueError, KeyError, FileNotFoundError):
            rename(run)


def _rename_results(run: Path) -> None:
    write_json(run / "results.json", _renamed_results(read_json(run / "results.json")))


def _rename_bag_predictions(run: Path) -> None:
    import pandas as pd

    table = pd.read_csv(run / "bag_predictions.csv", dtype=str, keep_default_na=False)
    with atomic_path(run / "bag_predictions.csv") as temporary:
        table.assign(encoder=table["encoder"].replace(ENCODERS)).to_csv(temporary, index=False)


def _rename_predictions(run: Path) -> None:
    import pandas as pd

    table = pd.read_parquet(run / "predictions.parquet")
    with atomic_path(run / "predictions.parquet") as temporary:
        table.assign(encoder=table["encoder"].replace(ENCODERS)).to_parquet(temporary, index=False)


def _renamed_results(results: dict[str, Any]) -> dict[str, Any]:
    """Encoders by their names; what they are in words was `start` and `method`, and is `names` now."""
    if "names" not in results:
        words = {"start": results.pop("start", "SimCLR"), "refined": results.pop("method", "ItS2CLR")}
        results["names"] = {**words, "end_to_end": "End to end"}
    return {ENCODERS.get(key, key): value for key, value in results.items()}


def _rename_in_state(run: Path) -> None:
    """Last: as long as the state has old names, an upgrade begins anew."""
    state = _state(run)
    stages = state.get("stages", {})
    for stage in list(stages):
        stages[_renamed_stage(stage)] = stages.pop(stage)
    models = stages.get("evaluate", {}).get("models")
    if models is not None:
        stages["evaluate"]["models"] = [_renamed_model(model) for model in models]
    if state:
        write_json(run / "state.json", state)


def _renamed_stage(stage: str) -> str:
    return f"aggregate {_renamed_model(stage.removeprefix('aggregate '))}" if stage.startswith("aggregate ") else stage


def _renamed_model(model: str) -> str:
    """`simclr dsmil` or `simclr`."""
    encoder, *rest = model.split(" ")
    return " ".join([ENCODERS.get(encoder, encoder), *rest])


def _state(run: Path) -> dict[str, Any]:
    path = run / "state.json"
    state: dict[str, Any] = read_json(path) if path.is_file() else {}
    return state

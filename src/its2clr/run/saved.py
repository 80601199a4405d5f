"""Settings and cohort of a run, read from its folder without opening it for training."""

from pathlib import Path

from its2clr.config import RunConfig
from its2clr.errors import InputError
from its2clr.files import damage_said
from its2clr.run.older_runs import upgrade
from its2clr.settings import parse_yaml, validate_config, without_folders


def require_run_config(path: str | Path) -> tuple[RunConfig, Path]:
    """Settings and cohort of a run; see `read_run_config`.

    Raises:
        InputError: The folder is not a run.
    """
    saved = read_run_config(path)
    if saved is None:
        raise InputError(f"{path}: not a run (it has no config.yaml); `its2clr fit COHORT --out RUN` makes one")
    return saved


def read_run_config(path: str | Path) -> tuple[RunConfig, Path] | None:
    """Settings and cohort of an existing run, or None. A run of an older version is brought up to date first.

    Raises:
        InputError: The config is damaged, or holds settings that do not exist.
    """
    file = Path(path) / "config.yaml"
    if not file.is_file():
        return None
    upgrade(Path(path))
    with damage_said(f"{file}: damaged, cannot be read"):
        text = file.read_text(encoding="utf-8")
    document = parse_yaml(text, f"{file}: damaged")
    if not isinstance(document, dict) or not isinstance(document.get("cohort"), str):
        raise InputError(f"{file}: not the config of a run (no cohort in it)")
    cohort, inside = Path(document.pop("cohort")), Path(path) / "cohort"
    if not cohort.exists() and inside.is_dir():  # a run that was moved with its cohort in it, such as the demo
        cohort = inside
    return validate_config(without_folders(document), str(file)), cohort

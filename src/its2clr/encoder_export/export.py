"""Export a run's encoder into one new folder, which appears whole."""

import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from its2clr.cohort import Cohort
from its2clr.config import EncoderConfig
from its2clr.encoder_export.card import Exported, model_card
from its2clr.encoder_export.network_files import ONNX, TimmFolder, require_onnx, write_onnx, write_timm_folder
from its2clr.encoder_export.trident import write_trident
from its2clr.encoders.encoder import Encoder
from its2clr.encoders.weights import load_network
from its2clr.engine.checkpoint import load_checkpoint
from its2clr.errors import InputError
from its2clr.files import bring_to_disk, disk_full_said, read_json, temporary_path, write_text
from its2clr.run.features import open_run_features, require_encoder
from its2clr.run.handover import preferred_encoders
from its2clr.run.made_from import outdated
from its2clr.run.scores import RESULTS_FILE
from its2clr.units import TilePixels

FORMATS = ("timm", "onnx", "features")


def export_encoder(
    run: str | Path,
    out: str | Path,
    encoder: str | None = None,
    formats: Collection[str] = ("timm",),
    licence: str | None = None,
    *,
    quiet: bool = True,
) -> Path:
    """Write a run's encoder for other software, with a model card.

    Args:
        run: Folder of the run.
        out: Folder to make; it must not exist, or be empty.
        encoder: "refined", "start" or "end_to_end"; None: the one that the run hands over.
        formats: Of "timm", "onnx" and "features".
        licence: Stated in the model card; None says that none is stated.
        quiet: Say nothing.

    Returns:
        The folder.

    Raises:
        InputError: The run has no such encoder, its results are out of date, a format is unknown, or the folder holds
            something.
    """
    out = Path(out)
    if not formats or not set(formats) <= set(FORMATS):
        raise InputError(f"formats {', '.join(formats) or 'none'}: give one or more of {', '.join(FORMATS)}")
    if "onnx" in formats:
        require_onnx()
    _refuse_content(out)
    features = open_run_features(run, quiet=quiet)
    opened = features.run
    encoder = encoder or preferred_encoders(opened.path)[0]
    path = require_encoder(opened, encoder)
    network = load_network(path).encoder.eval()
    built = EncoderConfig.model_validate(load_checkpoint(path)[1]["encoder"])
    _require_timm(built, formats)
    whole = Cohort.open(opened.cohort)
    cohort, size, results = whole.without_labels(), whole.tile_size, _results(opened.path)
    if results is not None and (lines := outdated(opened.path, opened.config, results, whole)):
        raise InputError(f"{run}: the results, which the model card states, are out of date: {'; '.join(lines)}")
    with whole_folder(out) as folder:
        timm = _write_timm(folder, network, built, size) if "timm" in formats else None
        if "onnx" in formats:
            write_onnx(folder / ONNX, network, size)
        trident = None
        if "features" in formats:
            trident = write_trident(
                folder, cohort, encoder, lambda part: features.of(encoder, part).features.cpu().numpy()
            )
        exported = Exported(encoder, built, network.feature_dim, timm, "onnx" in formats, trident)
        write_text(folder / "README.md", model_card(exported, opened.config, cohort, results, licence))
    if trident is not None:
        for note in trident.notes:
            features.engine.say(f"features: the name of the folder {trident.path.name} has {note}")
    return out


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a folder beside `path` that gets its name on success and is removed on failure.

    Raises:
        InputError: `path` holds something.
    """
    _refuse_content(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    try:
        with disk_full_said(path):
            temporary.mkdir()
            yield temporary
            for part in temporary.rglob("*"):
                bring_to_disk(part)
        _refuse_content(path)
        if path.is_dir():
            path.rmdir()
        temporary.rename(path)
        bring_to_disk(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_timm(folder: Path, encoder: Encoder, built: EncoderConfig, size: TilePixels) -> TimmFolder:
    """Write a folder that timm loads; of two networks side by side a folder for each."""
    if not built.side_by_side:
        return write_timm_folder(folder, encoder, built, size)
    for name, part in zip(("start", "refined"), encoder.parted(), strict=True):
        (folder / name).mkdir()
        written = write_timm_folder(folder / name, part, built, size)
    return written


def _refuse_content(path: Path) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(
            f"{path}: exists already, and an export never overwrites anything; give another --out, or remove it"
        )


def _require_timm(built: EncoderConfig, formats: Collection[str]) -> None:
    import timm

    if not timm.is_model(built.name) and set(formats) != {"features"}:
        raise InputError(f"the encoder {built.name!r} is not a network of timm, so only its features can be exported")


def _results(run: Path) -> dict[str, Any] | None:
    path = run / RESULTS_FILE
    found: dict[str, Any] | None = read_json(path) if path.is_file() else None
    return found

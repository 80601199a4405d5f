"""Find the slides in a folder, by the endings of their names."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from its2clr import far

SLIDE_SUFFIXES = (
    ".bif", ".czi", ".dcm", ".mrxs", ".ndpi", ".scn", ".svs", ".svslide", ".tif", ".tiff", ".vms", ".vmu", ".zvi",
)  # fmt: skip
"""Files of a folder that are tried as slides; a file that is given itself may have any name."""


def find_slides(folder: Path) -> list[Path]:
    """Slides in a folder and the folders below it, sorted; hidden files are left out, and a DICOM slide counts once."""
    if far.is_far(folder):
        return [file for file in far.files_below(folder) if file.suffix.lower() in SLIDE_SUFFIXES]
    found: list[Path] = []
    seen: set[Path] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        if Path(place).resolve() in seen:  # a link to a folder above would be followed for ever
            folders.clear()
            continue
        seen.add(Path(place).resolve())
        folders[:] = [name for name in folders if not name.startswith(".")]
        files = (Path(place) / name for name in names if not name.startswith("."))
        found += [file for file in files if file.suffix.lower() in SLIDE_SUFFIXES and file.is_file()]
    return list(_one_per_series(sorted(found)))


def _one_per_series(files: Iterable[Path]) -> Iterator[Path]:
    """Only the first file of each DICOM slide, which has one per level and kind of picture."""
    seen: set[tuple[Path, str]] = set()
    for file in files:
        if file.suffix.lower() == ".dcm":
            key = (file.parent, _series(file))
            if key in seen:
                continue
            seen.add(key)
        yield file


def _series(file: Path) -> str:
    import pydicom

    try:
        found = pydicom.dcmread(file, stop_before_pixels=True, specific_tags=["SeriesInstanceUID"])
    except Exception:  # noqa: BLE001 - the problem is reported when it is opened as a slide
        return file.name
    return str(found.get("SeriesInstanceUID", file.name))

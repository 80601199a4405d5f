"""Annotations of a slide, whatever tool they come from, as one tumour geometry in pixels of level 0."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from its2clr.cohort.slides.geojson import read_geojson
from its2clr.cohort.slides.masks import is_tiff, mask_values, read_mask
from its2clr.cohort.slides.shapes import EMPTY, Annotations, Shape, Shapes
from its2clr.cohort.slides.xml_annotations import read_xml_annotations
from its2clr.errors import InputError
from its2clr.files import damage_said, is_there

_FORMATS = "ASAP XML, ImageScope XML, GeoJSON, PNG or TIFF masks"
_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")


def read_annotations(
    path: Path,
    level0_per_mask_pixel: float | None = None,
    classes: Collection[str] | None = None,
    *,
    level0_size: tuple[int, int] | None = None,
) -> Annotations:
    """Read the tumour of a slide: ASAP or ImageScope XML, GeoJSON (QuPath), or a binary mask (PNG, TIFF).

    Args:
        path: The file.
        level0_per_mask_pixel: For a mask, how many pixels of level 0 a pixel of it stands for, along a side.
        classes: Groups, layers (by name or Id), class names or mask values that count as tumour. None: the names that
            are known to be tumour (`shapes.TUMOUR_NAMES`), or everything if nothing has a name; for a mask, what is
            not 0.
        level0_size: Width and height of the slide; gives the scale of a mask where that is not given.

    Raises:
        InputError: If the file is missing, damaged, of an unknown kind or with classes of unknown meaning; the
            message says where and what to do.
    """
    path = Path(path)
    with damage_said(f"{path}: is damaged, or no annotation that is known", "save the annotations again"):
        return _read(path, level0_per_mask_pixel, classes, level0_size)


def read_shapes(path: Path) -> Shapes:
    """Everything that is annotated, with its classes; of a mask its values, without their areas.

    Raises:
        InputError: As of `read_annotations`, but for what classes mean.
    """
    path = Path(path)
    with damage_said(f"{path}: is damaged, or no annotation that is known", "save the annotations again"):
        start, shapes = _first_bytes(path), Shapes(path)
        if _is_mask(path, start):
            values = mask_values(path, shapes)
            return replace(shapes, named=[Shape(str(value), EMPTY) for value in values], is_mask=True)
        return _outlines(path, start, shapes)


def _read(
    path: Path,
    level0_per_mask_pixel: float | None,
    classes: Collection[str] | None,
    level0_size: tuple[int, int] | None,
) -> Annotations:
    start, shapes = _first_bytes(path), Shapes(path)
    if _is_mask(path, start):
        return read_mask(
            path,
            shapes,
            level0_per_mask_pixel=level0_per_mask_pixel,
            level0_size=level0_size,
            classes=classes,
        )
    return _outlines(path, start, shapes).tumour(classes)


def _is_mask(path: Path, start: bytes) -> bool:
    return start.startswith(b"\x89PNG") or is_tiff(path)


def _outlines(path: Path, start: bytes, shapes: Shapes) -> Shapes:
    if start.startswith(b"<") or path.suffix.lower() == ".xml":
        read_xml_annotations(path, shapes)
    elif start.startswith((b"{", b"[")) or path.suffix.lower() in (".json", ".geojson"):
        read_geojson(path, shapes)
    else:
        raise InputError(f"{path}: is no file of annotations that is known; give {_FORMATS}")
    return shapes


def _first_bytes(path: Path) -> bytes:
    """The first bytes that say what a file is, without byte order mark, zeros of UTF-16 and white space."""
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        reason = "the file does not exist" if not is_there(path) else f"cannot be read ({error.strerror})"
        raise InputError(f"{path}: {reason}; give the annotations of the slide, or none") from error
    if not start:
        raise InputError(f"{path}: the file is empty; save the annotations again")
    for mark in _BYTE_ORDER_MARKS:
        start = start.removeprefix(mark)
    return start.lstrip(b"\0 \t\r\n")

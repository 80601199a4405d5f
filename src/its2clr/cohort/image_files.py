"""Turn one image file of any kind into one encoded square RGB tile, or say why that cannot be done."""

import io
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from its2clr import far
from its2clr.cohort.layout import Encoding
from its2clr.errors import InputError
from its2clr.files import is_there
from its2clr.units import TilePixels

Resize = Literal["bilinear", "nearest", "bicubic"]
Crop = Literal["ultrasound"]

FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "nearest": Image.Resampling.NEAREST,
    "bicubic": Image.Resampling.BICUBIC,
}
LARGEST_IMAGE = 2**26
"""Pixels of the largest image that is taken as one tile: a few hundred bytes can declare any number."""
_EXIF_ORIENTATION = 0x0112
_UPRIGHT = 1
_LARGEST_16_BIT = 65535
_DICOM_PREAMBLE = 128
_DICOM_GREY = ("MONOCHROME1", "MONOCHROME2")


class ImageProblem(Exception):  # noqa: N818 - it is a row of problems.csv, not an error of the program
    """The image cannot be used; the message says why."""


def check_tile_settings(
    tile_size: TilePixels, encoding: str, quality: int, resize: str, crop: str | None = None
) -> None:
    """Check how tiles are to be made.

    Raises:
        InputError: If a setting is out of range.
    """
    if tile_size < 1:
        raise InputError(f"tile_size must be at least 1 pixel, got {tile_size}")
    if encoding not in get_args(Encoding):
        raise InputError(f"encoding must be one of {', '.join(get_args(Encoding))}, got {encoding!r}")
    if resize not in FILTERS:
        raise InputError(f"resize must be one of {', '.join(FILTERS)}, got {resize!r}")
    if not 1 <= quality <= 100:
        raise InputError(f"quality must be between 1 and 100, got {quality}")
    if crop is not None and crop not in get_args(Crop):
        raise InputError(f"crop must be one of {', '.join(get_args(Crop))}, or not be set; got {crop!r}")


def prepare_image(
    path: Path,
    *,
    tile_size: TilePixels,
    encoding: Encoding,
    quality: int = 95,
    resize: Resize = "bilinear",
    crop: Crop | None = None,
) -> bytes:
    """Decode an image completely and give it as an encoded square RGB tile.

    A file that already is such a tile is given byte for byte. Otherwise the image is turned upright (EXIF),
    converted to RGB, cropped if that is asked for, and resized once. Transparent parts become white; 16-bit grey is
    divided by 257, the same for every image, so that brightness stays comparable. Of several frames the first is
    taken. DICOM images are read with pydicom.

    Raises:
        ImageProblem: If the file is missing, damaged, cannot be shown as RGB without guessing, or has nothing to
            crop to.
    """
    try:
        with far.local(path) as file:
            content = file.read_bytes()
    except OSError as error:
        reason = "the file does not exist" if not is_there(path) else f"cannot be read ({error.strerror})"
        raise ImageProblem(reason) from error
    if not content:
        raise ImageProblem("the file is empty")
    try:
        with _open_dicom(content) if _is_dicom(content) else Image.open(io.BytesIO(content)) as image:
            _check_size(*image.size)
            image.load()
            is_tile = _is_tile(image, tile_size, encoding)
            whole = to_rgb(ImageOps.exif_transpose(image))
    except ImageProblem:
        raise
    except Exception as error:
        raise ImageProblem(f"cannot be decoded: {_describe(error)}") from error
    tile = whole if crop is None else _crop_to_scan(whole)
    if tile is whole and is_tile:
        return content
    if tile.size != (tile_size, tile_size):
        tile = tile.resize((tile_size, tile_size), FILTERS[resize])
    return encode_tile(tile, encoding, quality)


def _crop_to_scan(image: Image.Image) -> Image.Image:
    from its2clr.cohort.ultrasound import crop_to_scan  # loads scipy, which few commands need

    scan = crop_to_scan(image)
    if scan is None:
        raise ImageProblem("no ultrasound scan was found in it, only flat areas, lines and text")
    return scan


def _check_size(width: int, height: int) -> None:
    """Refuse an image by the size it declares, before memory is taken for its pixels."""
    if width * height > LARGEST_IMAGE:
        raise ImageProblem(
            f"has {width} x {height} pixels, too many for one tile (at most {LARGEST_IMAGE}); cut it into tiles first"
        )


def _is_dicom(content: bytes) -> bool:
    """Whether a file is DICOM, by its magic bytes."""
    return content[_DICOM_PREAMBLE : _DICOM_PREAMBLE + 4] == b"DICM"


def _open_dicom(content: bytes) -> Image.Image:
    """Decode an image in DICOM (ultrasound, photographs) to 8-bit grey or RGB; of several frames the first.

    Deeper grey is scaled from the full range of its stored bits, the same for every image; the windows of a viewer
    are not applied. Whole slides in DICOM are another matter: OpenSlide reads them.

    Raises:
        ValueError: If it holds no picture, or one that cannot be shown as RGB without guessing.
    """
    import pydicom
    from pydicom.pixels.utils import pixel_array

    dataset = pydicom.dcmread(io.BytesIO(content))
    if "PixelData" not in dataset:
        raise ValueError("it is a DICOM file without pixels")
    _check_size(int(dataset.Columns), int(dataset.Rows))
    meaning = str(dataset.PhotometricInterpretation)
    pixels = pixel_array(dataset, index=0)  # colours come as RGB
    if pixels.ndim == 3 and pixels.dtype == np.uint8:
        return Image.fromarray(pixels)
    if pixels.ndim != 2 or meaning not in _DICOM_GREY:
        raise ValueError(f"it has {meaning} pixels of {pixels.dtype}; convert it to 8-bit RGB or to grey")
    if pixels.dtype.kind != "u":
        raise ValueError("it has signed pixels of unknown range; convert it to 8 or 16 bits without sign")
    grey = np.rint(pixels.astype(np.float64) * (255 / (2 ** int(dataset.BitsStored) - 1)))
    grey = np.clip(grey, 0, 255).astype(np.uint8)
    return Image.fromarray(255 - grey if meaning == "MONOCHROME1" else grey)


def encode_tile(tile: Image.Image, encoding: Encoding, quality: int = 95) -> bytes:
    """Encode an RGB tile the way cohorts store it."""
    buffer = io.BytesIO()
    if encoding == "jpeg":
        tile.save(buffer, "JPEG", quality=quality, subsampling=0)  # colour at full resolution
    else:
        tile.save(buffer, "PNG", compress_level=3)
    return buffer.getvalue()


def _is_tile(image: Image.Image, tile_size: TilePixels, encoding: Encoding) -> bool:
    return (
        image.format == encoding.upper()
        and image.mode == "RGB"
        and image.size == (tile_size, tile_size)
        and "transparency" not in image.info
        and image.getexif().get(_EXIF_ORIENTATION, _UPRIGHT) == _UPRIGHT
    )


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any image to 8-bit RGB: transparency over white, 16-bit grey scaled as a whole.

    Raises:
        ImageProblem: If the pixels are floats or integers beyond 16 bits, whose range is not known.
    """
    if image.mode == "F":
        raise ImageProblem("has floating point pixels of unknown range; convert it to 8 or 16 bits")
    if image.mode == "I" or image.mode.startswith("I;"):
        pixels = np.asarray(image)
        if pixels.min() < 0 or pixels.max() > _LARGEST_16_BIT:
            raise ImageProblem("has pixels beyond 16 bits; convert it to 8 or 16 bits")
        return Image.fromarray(np.rint(pixels / np.float32(257)).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        layered = image.convert("RGBA")
        white = Image.new("RGBA", layered.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layered).convert("RGB")
    return image.convert("RGB")


def _describe(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "it is no image of a known kind"
    if isinstance(error, Image.DecompressionBombError):
        return "it is too large to be one tile; cut it into tiles first"
    return str(error).strip() or type(error).__name__

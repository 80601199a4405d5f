"""Ordinary images in DICOM files (ultrasound, photographs) through pydicom; slides in DICOM go through OpenSlide."""

import io

import numpy as np
from PIL import Image

_PREAMBLE = 128
_GREY = ("MONOCHROME1", "MONOCHROME2")


def is_dicom(content: bytes) -> bool:
    """Whether a file is DICOM, by its magic bytes."""
    return content[_PREAMBLE : _PREAMBLE + 4] == b"DICM"


def open_dicom(content: bytes) -> Image.Image:
    """Decode a DICOM image to 8-bit grey or RGB; of several frames the first.

    Deeper grey is scaled from the full range of its stored bits, the same for every image; windows of the viewer
    are not applied.

    Raises:
        ValueError: If it holds no picture, or one that has no honest RGB form.
    """
    import pydicom
    from pydicom.pixels.utils import pixel_array

    dataset = pydicom.dcmread(io.BytesIO(content))
    if "PixelData" not in dataset:
        raise ValueError("it is a DICOM file without pixels")
    meaning = str(dataset.PhotometricInterpretation)
    pixels = pixel_array(dataset, index=0)  # colours come as RGB
    if pixels.ndim == 3 and pixels.dtype == np.uint8:
        return Image.fromarray(pixels)
    if pixels.ndim != 2 or meaning not in _GREY:
        raise ValueError(f"it has {meaning} pixels of {pixels.dtype}; convert it to 8-bit RGB or to grey")
    if pixels.dtype.kind != "u":
        raise ValueError("it has signed pixels of unknown range; convert it to 8 or 16 bits without sign")
    grey = np.rint(pixels.astype(np.float64) * (255 / (2 ** int(dataset.BitsStored) - 1)))
    grey = np.clip(grey, 0, 255).astype(np.uint8)
    return Image.fromarray(255 - grey if meaning == "MONOCHROME1" else grey)

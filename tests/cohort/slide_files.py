"""Small slides written by the tests, the two real ones where they are present, and plain ways to look at them."""

import io
from pathlib import Path

import numpy as np
import tifffile
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.uid import (
    ExplicitVRLittleEndian,
    JPEGBaseline8Bit,
    VLWholeSlideMicroscopyImageStorage,
    generate_uid,
)

from its2clr.cohort.slides.glass import Glass
from its2clr.cohort.slides.tiler import cut_tiles, read_thumbnail
from its2clr.cohort.slides.tissue import TissueTest

REAL_SLIDES = Path(__file__).resolve().parents[3] / "shared" / "data" / "slides"
ROUND_MPP = 0.5


def draw(width: int = 700, height: int = 500, seed: int = 0, glass: int = 243, blobs: int = 4) -> np.ndarray:
    """Noisy glass with blobs of coloured, textured tissue."""
    rng = np.random.default_rng(seed)
    pixels = np.full((height, width, 3), glass, np.float64) + rng.normal(0, 1.5, (height, width, 1))
    y, x = np.mgrid[:height, :width]
    for _ in range(blobs):
        cx, cy, radius = rng.uniform(0, width), rng.uniform(0, height), rng.uniform(0.1, 0.25) * min(width, height)
        inside = (x - cx) ** 2 + (y - cy) ** 2 < radius**2
        grain = int(rng.choice([1, 2, 4, 8]))
        texture = rng.normal(0, 25, (height // grain + 1, width // grain + 1, 1)).repeat(grain, 0).repeat(grain, 1)
        colour = np.array([190, 110, 170]) + rng.normal(0, 15, 3)
        pixels[inside] = (colour + texture[:height, :width])[inside]
    return np.clip(pixels, 0, 255).astype(np.uint8)


def halve(pixels: np.ndarray) -> np.ndarray:
    """The next level of a pyramid: means of 2 x 2."""
    height, width = (side // 2 * 2 for side in pixels.shape[:2])
    blocks = pixels[:height, :width].reshape(height // 2, 2, width // 2, 2, 3)
    return blocks.mean(axis=(1, 3)).round().astype(np.uint8)


def _resolution(mpp: float | None) -> dict[str, object]:
    return {} if mpp is None else {"resolution": (1e4 / mpp, 1e4 / mpp), "resolutionunit": "CENTIMETER"}


def write_levels(path: Path, levels: list[np.ndarray]) -> Path:
    """A tiled TIFF with just these levels."""
    with tifffile.TiffWriter(path) as file:
        for number, pixels in enumerate(levels):
            file.write(pixels, subfiletype=int(number > 0), tile=(64, 64), photometric="rgb", metadata=None)
    return path


def write_pyramid(path: Path, pixels: np.ndarray, levels: int = 4, mpp: float | None = ROUND_MPP, **more) -> Path:
    """A tiled pyramidal TIFF that OpenSlide reads."""
    options = {"tile": (64, 64), "photometric": "rgb", "compression": "deflate", "metadata": None, **more}
    with tifffile.TiffWriter(path) as file:
        for level in range(levels):
            file.write(pixels, subfiletype=int(level > 0), **options, **_resolution(mpp and mpp * 2**level))
            pixels = halve(pixels)
    return path


def write_ome(path: Path, pixels: np.ndarray, levels: int = 3, mpp: float | None = ROUND_MPP) -> Path:
    """An OME-TIFF with its pyramid in SubIFDs."""
    metadata = {"axes": "YXS"}
    if mpp is not None:
        metadata |= {"PhysicalSizeX": mpp, "PhysicalSizeY": mpp, "PhysicalSizeXUnit": "µm", "PhysicalSizeYUnit": "µm"}
    options = {"tile": (64, 64), "photometric": "rgb", "compression": "deflate"}
    with tifffile.TiffWriter(path, ome=True) as file:
        file.write(pixels, subifds=levels - 1, metadata=metadata, **options)
        for _ in range(levels - 1):
            pixels = halve(pixels)
            file.write(pixels, subfiletype=1, **options)
    return path


def write_plain(path: Path, pixels: np.ndarray, mpp: float | None = ROUND_MPP, **more) -> Path:
    """A TIFF in strips, without pyramid, which OpenSlide declines."""
    options = {"photometric": "rgb", "metadata": None, **more}
    tifffile.imwrite(path, pixels, **options, **_resolution(mpp))
    return path


def write_dicom(
    folder: Path, pixels: np.ndarray, levels: int = 3, mpp: float = ROUND_MPP, *, jpeg: bool = False
) -> Path:
    """A VL Whole Slide Microscopy series, one file per level, tiled in full; gives back its folder."""
    folder.mkdir(parents=True)
    series = generate_uid()
    for number in range(levels):
        level = _dicom_level(pixels, 64, mpp * 2**number, jpeg=jpeg)
        level.SeriesInstanceUID = series
        level.InstanceNumber = number + 1
        level.ImageType = (
            ["DERIVED", "PRIMARY", "VOLUME", "RESAMPLED"] if number else ["ORIGINAL", "PRIMARY", "VOLUME", "NONE"]
        )
        level.save_as(folder / f"level-{number}.dcm", enforce_file_format=True)
        pixels = halve(pixels)
    return folder


def _dicom_level(pixels: np.ndarray, side: int, mpp: float, *, jpeg: bool) -> Dataset:
    height, width = pixels.shape[:2]
    rows, columns = -(-height // side), -(-width // side)
    whole = np.full((rows * side, columns * side, 3), 255, np.uint8)
    whole[:height, :width] = pixels
    frames = whole.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
    level = Dataset()
    level.file_meta = FileMetaDataset()
    level.file_meta.TransferSyntaxUID = JPEGBaseline8Bit if jpeg else ExplicitVRLittleEndian
    level.SOPClassUID, level.SOPInstanceUID = VLWholeSlideMicroscopyImageStorage, generate_uid()
    level.Modality, level.DimensionOrganizationType = "SM", "TILED_FULL"
    level.Rows = level.Columns = side
    level.NumberOfFrames = len(frames)
    level.TotalPixelMatrixColumns, level.TotalPixelMatrixRows = width, height
    level.SamplesPerPixel, level.PlanarConfiguration, level.PixelRepresentation = 3, 0, 0
    level.PhotometricInterpretation = "YBR_FULL_422" if jpeg else "RGB"
    level.BitsAllocated, level.BitsStored, level.HighBit = 8, 8, 7
    measures, groups = Dataset(), Dataset()
    measures.PixelSpacing = [mpp / 1000, mpp / 1000]
    groups.PixelMeasuresSequence = [measures]
    level.SharedFunctionalGroupsSequence = [groups]
    level.PixelData = encapsulate([_jpeg(frame) for frame in frames]) if jpeg else frames.tobytes()
    level["PixelData"].VR = "OB"
    return level


def _jpeg(frame: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def mean_saturation(tile: Image.Image) -> float:
    """Slow and plain: 255 * (max - min) / max of each pixel, cut to whole numbers, as 8-bit HSV has it."""
    total = 0
    pixels = np.asarray(tile).reshape(-1, 3).tolist()
    for red, green, blue in pixels:
        high, low = max(red, green, blue), min(red, green, blue)
        total += 255 * (high - low) // high if high else 0
    return total / len(pixels)


def kept_tiles(slide, plan, *, thumbnail=True, resize="bilinear"):
    """The pixels of the kept tiles by number, and how many tiles were read; with or without skipping glass."""
    test = TissueTest()
    shown = read_thumbnail(slide, plan) if thumbnail else None
    glass = shown and Glass(shown, plan.coords(), plan.side, test.min_saturation)
    tiles = list(cut_tiles(slide, plan, test, resize, glass))
    assert len({tile.number for tile in tiles}) == len(tiles)
    return {tile.number: np.asarray(tile.image) for tile in tiles if tile.verdict == "kept"}, len(tiles)

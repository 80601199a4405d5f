"""Open a slide of any kind behind one small interface: its levels, its scale, and regions at level-0 coordinates."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from its2clr import far
from its2clr.errors import InputError
from its2clr.files import damage_said, is_there
from its2clr.units import Level0Pixels, Level0Size, MicronsPerPixel

SMALLEST_MPP, LARGEST_MPP = MicronsPerPixel(0.05), MicronsPerPixel(10.0)
"""What a microscope can have; 1200 dots per inch, a screen's 72 dpi and the like fall outside."""

_MOST_UNEQUAL = 1.05
LARGEST_CACHE = 256 * 2**20
_SMALLEST_CACHE = 32 * 2**20
_OME = "<OME "
_SEVERAL_FILES = (".dcm", ".mrxs", ".vms", ".vmu")
_OTHER_COMPRESSION = "Unsupported TIFF compression"


class SlideProblem(Exception):  # noqa: N818 - it is a row of problems.csv, not an error of the program
    """The slide cannot be used; the message says why."""


@dataclass(frozen=True)
class Level:
    """One resolution of a slide.

    Attributes:
        width: Pixels.
        height: Pixels.
        downsample: Level-0 pixels per pixel of this level.
    """

    width: int
    height: int
    downsample: float


Scale = tuple[MicronsPerPixel, MicronsPerPixel]
"""Microns per pixel of level 0 in x and y."""


class SlideImage(Protocol):
    """An open slide.

    Attributes:
        levels: The resolutions, the finest first.
        mpp: Scale of level 0 as the file says it, possible or not; None if it says nothing.
        identity: The same for copies of one slide and for the files of one DICOM slide; "" if that is not known.
    """

    levels: tuple[Level, ...]
    mpp: Scale | None
    identity: str

    def read_region(self, x: Level0Pixels, y: Level0Pixels, level: int, width: int, height: int) -> Image.Image:
        """Read an RGB region of a level; what the slide does not hold is white.

        Args:
            x: Left edge in pixels of level 0.
            y: Upper edge in pixels of level 0.
            level: Which of `levels`.
            width: Pixels of that level.
            height: Pixels of that level.

        Raises:
            SlideProblem: If the place cannot be read.
        """
        ...

    def close(self) -> None:
        """Free the file."""
        ...


@contextmanager
def open_slide(path: Path) -> Iterator[SlideImage]:
    """Open a slide with OpenSlide or, where that declines, as a TIFF or OME-TIFF with tifffile.

    Raises:
        SlideProblem: If the file is missing, empty, damaged, or no slide.
    """
    slide = _open(Path(path))
    try:
        yield slide
    finally:
        slide.close()


@contextmanager
def open_named_slide(path: Path) -> Iterator[SlideImage]:
    """Open a slide that a person named: a file, or an address, from which it is fetched.

    Raises:
        SlideProblem: As `open_slide`, or there is no such object.
        InputError: It cannot be fetched.
    """
    with ExitStack() as opened:
        if far.is_far(path) and path.suffix.lower() in _SEVERAL_FILES:
            raise SlideProblem(f"a slide of several files ({path.suffix}) is not fetched; copy its folder here")
        try:
            file = opened.enter_context(far.local(path))
        except FileNotFoundError as error:
            raise SlideProblem("there is no such object") from error
        yield opened.enter_context(open_slide(file))


def _open(path: Path) -> SlideImage:
    from its2clr.cohort.slides.tiff import TiffImage

    _check_file(path)
    with damage_said("is damaged, or no slide", raised=SlideProblem):
        slide = _open_with_openslide(path)
        return TiffImage(path) if slide is None else slide


def _check_file(path: Path) -> None:
    try:
        if path.is_dir():
            raise SlideProblem("is a folder; name one file (of a DICOM slide, any file of its levels)")
        if path.stat().st_size == 0:
            raise SlideProblem("the file is empty")
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        reason = "the file does not exist" if not is_there(path) else f"cannot be read ({error.strerror})"
        raise SlideProblem(reason) from error


def _open_with_openslide(path: Path) -> "OpenSlideImage | None":
    import openslide

    try:
        slide = openslide.OpenSlide(os.fspath(path))
    except openslide.OpenSlideUnsupportedFormatError:
        return None
    except openslide.OpenSlideError as error:
        if _OTHER_COMPRESSION in str(error):
            return None
        raise SlideProblem(f"OpenSlide cannot open it: {error}") from error
    # To OpenSlide an OME-TIFF is a TIFF without pyramid and scale; tifffile reads both.
    if slide.properties.get("openslide.vendor") == "generic-tiff" and _OME in slide.properties.get(
        "tiff.ImageDescription", ""
    ):
        slide.close()
        return None
    return OpenSlideImage(slide, path)


class OpenSlideImage:
    """A slide that OpenSlide reads."""

    def __init__(self, slide: Any, file: Path) -> None:
        self._slide, self.file = slide, file
        self.levels = tuple(
            Level(width, height, downsample)
            for (width, height), downsample in zip(slide.level_dimensions, slide.level_downsamples, strict=True)
        )
        self.mpp = _openslide_mpp(slide.properties)
        self.identity = str(slide.properties.get("openslide.quickhash-1", ""))
        self.vendor = str(slide.properties.get("openslide.vendor", ""))
        self._use_cache()

    def _use_cache(self) -> None:
        import openslide

        height = 512
        with suppress(ValueError):
            height = int(self._slide.properties.get("openslide.level[0].tile-height", height))
        self._slide.set_cache(openslide.OpenSlideCache(cache_bytes(4 * height * self.levels[0].width)))

    def read_region(self, x: Level0Pixels, y: Level0Pixels, level: int, width: int, height: int) -> Image.Image:
        """Read a region of a level; see `SlideImage`."""
        import openslide

        try:
            region = self._slide.read_region((x, y), level, (width, height))
        except openslide.OpenSlideError as error:
            raise SlideProblem(f"cannot be read at x {x}, y {y}: {error}") from error
        return over_white(region)

    def close(self) -> None:
        """Free the file."""
        self._slide.close()


def cache_bytes(row: int) -> int:
    """Room for two rows of the file's own tiles, so that walking along a row decodes each of them once."""
    return min(max(2 * row, _SMALLEST_CACHE), LARGEST_CACHE)


def slide_size(slide: SlideImage) -> Level0Size:
    """Width and height of a slide at level 0."""
    return Level0Pixels(slide.levels[0].width), Level0Pixels(slide.levels[0].height)


def over_white(region: Image.Image) -> Image.Image:
    """RGB of an RGBA region: what is transparent becomes white."""
    if region.getchannel("A").getextrema() == (255, 255):
        return region.convert("RGB")
    white = Image.new("RGBA", region.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, region).convert("RGB")


def _openslide_mpp(properties: Any) -> Scale | None:
    try:
        across, down = (float(properties[f"openslide.mpp-{axis}"]) for axis in "xy")
    except (KeyError, ValueError):
        return None
    return MicronsPerPixel(across), MicronsPerPixel(down)


def is_possible(mpp: float) -> bool:
    """Whether this can be the scale of a slide at level 0."""
    return SMALLEST_MPP <= mpp <= LARGEST_MPP


def check_mpp(mpp: float, name: str) -> None:
    """Check a scale that a person gave.

    Raises:
        InputError: If it cannot be right.
    """
    if not is_possible(mpp):
        raise InputError(f"{name} is {mpp:g} um/px, expected {SMALLEST_MPP:g} to {LARGEST_MPP:g}")


def believable(said: Scale | None) -> Scale | None:
    """The scale that a file says; None if it says nothing, or what cannot be."""
    return said if said is not None and all(is_possible(mpp) for mpp in said) else None


def slide_mpp(said: Scale | None, given: MicronsPerPixel | None, default: MicronsPerPixel | None) -> MicronsPerPixel:
    """The scale of level 0: what the file says if that can be, else what the manifest says, else the default.

    Nothing is ever guessed.

    Args:
        said: What the file says.
        given: What the manifest says.
        default: What to use without either.

    Raises:
        SlideProblem: If none of them says, or pixels are not square.
    """
    found = believable(said)
    if found is not None:
        if max(found) > _MOST_UNEQUAL * min(found):
            raise SlideProblem(f"pixels are not square: {found[0]:g} by {found[1]:g} um")
        return MicronsPerPixel((found[0] + found[1]) / 2)
    for mpp in (given, default):
        if mpp is not None:
            return mpp
    reason = "the file does not say" if said is None else f"the file says {said[0]:g} um/px, which cannot be"
    raise SlideProblem(f"the scale is unknown: {reason}; give column mpp in the manifest, or --default-mpp")

"""Maps as pyramidal OME-TIFFs that lie exactly over their slides, for viewers of slides.

```
overlays/<model>/colour/<bag_id>.ome.tiff        colours over the slide, transparent below the threshold
overlays/<model>/probability/<bag_id>.ome.tiff   the probabilities themselves
```

Pixel (i, j) of level n is the square of level-0 pixels of the slide with its corner at (i, j) times factor times 2**n:
the upper left corners agree, and so do the physical sizes. Every level is made from the scores, not from the level
before it, one tile at a time: memory does not grow with the slide.

OME-TIFF keeps the smaller levels in SubIFDs; OpenSlide looks for them in the chain of pages. Here the pages are written
once and linked from both.
"""

import itertools
import math
import struct
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from numpy.typing import NDArray

from its2clr.cohort.canvas import open_canvas
from its2clr.errors import InputError
from its2clr.files import atomic_path
from its2clr.maps.heat import SCALE, Window, check_threshold, colour, heat, tiles_in
from its2clr.maps.source import ScoredModel, Source, bag_file
from its2clr.run.scores import BagScores
from its2clr.units import Level0Pixels, Level0Size, MicronsPerPixel
from its2clr.version import __version__

TILE = 512
LARGEST_FACTOR = 16
USUAL_FACTOR = 8
_SMALLEST_FACTOR = 4
_NAMESPACE = uuid.UUID("5a3f6f0e-6a0e-5d0c-9c53-6b1f7a1f2b51")

_Paint = Callable[[NDArray[np.float64]], NDArray[Any]]


@dataclass(frozen=True)
class Ground:
    """What an overlay lies on.

    Attributes:
        size: Width and height of the slide at level 0.
        mpp_level0: Microns per pixel of level 0; NaN if unknown.
        factor: Level-0 pixels per pixel of the overlay, along a side.
    """

    size: Level0Size
    mpp_level0: MicronsPerPixel
    factor: int

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise InputError(f"factor is the slide pixels per overlay pixel, 1 or more; got {self.factor}")

    def levels(self) -> list[tuple[int, int]]:
        """Width and height of the levels; the last one is not larger than a tile."""
        halvings = max(0, math.ceil(math.log2(max(self.size) / self.factor / TILE)))
        steps = [self.factor * 2**level for level in range(halvings + 1)]
        return [(-(-self.size[0] // step), -(-self.size[1] // step)) for step in steps]


def write_overlays(
    source: Source,
    bag_ids: Sequence[str],
    models: Sequence[ScoredModel],
    out: Path,
    *,
    threshold: float | None = None,
    factor: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the overlays of every bag and model.

    Args:
        source: Where the bags are.
        bag_ids: The bags.
        models: Those to write.
        out: Folder to write into.
        threshold: Probability below which the coloured overlay is transparent; None: each model's own.
        factor: Level-0 pixels per pixel of the overlay; None: see `choose_factor`.
        progress: Called with the number of bags done and of all bags.

    Returns:
        The folder of the overlays.
    """
    check_threshold(threshold)
    folder = out / "overlays"
    for done, bag_id in enumerate(bag_ids, start=1):
        tiles = source.places[bag_id].tiles()
        with open_canvas(tiles) as canvas:
            size = canvas.size
        for model in models:
            scores = model.bag(bag_id)
            ground = Ground(size, tiles.mpp_level0, choose_factor(scores) if factor is None else factor)
            place = folder / model.folder
            seen_from = model.positive_from(threshold)
            write_overlay(bag_file(place / "colour", bag_id, ".ome.tiff"), scores, ground, seen_from, model.title)
            write_probability(bag_file(place / "probability", bag_id, ".ome.tiff"), scores, ground, model.title)
        if progress is not None:
            progress(done, len(bag_ids))
    return folder


def choose_factor(scores: BagScores) -> int:
    """The largest factor up to 16 that lets every tile end on a pixel; 8 if only 1, 2 or 3 would."""
    common = math.gcd(scores.side, *np.unique(scores.coords).tolist())
    exact = max(number for number in range(1, LARGEST_FACTOR + 1) if common % number == 0)
    return exact if exact >= _SMALLEST_FACTOR else USUAL_FACTOR


def write_overlay(path: Path, scores: BagScores, ground: Ground, threshold: float, title: str) -> None:
    """Write a map as an RGBA pyramid: opaque at or above the threshold, transparent elsewhere.

    Args:
        path: File to write, `*.ome.tiff`.
        scores: What a model says about the bag.
        ground: The slide.
        threshold: Probability below which nothing is seen.
        title: Of the model.
    """
    facts = {"threshold": f"{threshold:g}", "colours": f"{SCALE} from 0 to 1"}
    _write(path, scores, ground, lambda values: colour(values, threshold), title, facts)


def write_probability(path: Path, scores: BagScores, ground: Ground, title: str) -> None:
    """Write the probabilities themselves as a pyramid of one channel, 32-bit float; 0 where there is no tile."""
    facts = {"values": "probability from 0 to 1; 0 where there is no tile"}
    _write(path, scores, ground, lambda values: np.nan_to_num(values).astype(np.float32), title, facts)


def _write(path: Path, scores: BagScores, ground: Ground, paint: _Paint, title: str, facts: dict[str, str]) -> None:
    sizes = ground.levels()
    sample = paint(np.full((1, 1), np.nan))
    samples = sample.shape[2:]
    description = _describe(scores, ground, sample, sizes[0], title, facts)
    options: dict[str, Any] = {"photometric": "rgb", "extrasamples": ["UNASSALPHA"]} if samples else {}
    with atomic_path(path) as temporary:
        with tifffile.TiffWriter(temporary, bigtiff=True) as file:
            for level, (width, height) in enumerate(sizes):
                step = ground.factor * 2**level
                file.write(
                    _tiles(scores, (width, height), step, paint),
                    shape=(height, width, *samples),
                    dtype=sample.dtype,
                    tile=(TILE, TILE),
                    compression=tifffile.COMPRESSION.ADOBE_DEFLATE,
                    metadata=None,
                    description=description if level == 0 else None,
                    software=False,
                    subifds=len(sizes) - 1 if level == 0 else None,
                    subfiletype=int(level > 0),
                    **_resolution(ground.mpp_level0 * step),
                    **options,
                )
        _link_levels(temporary)


def _tiles(scores: BagScores, size: tuple[int, int], step: int, paint: _Paint) -> Iterator[bytes]:
    """The compressed tiles of a level, row by row.

    Empty tiles are written too: OpenSlide takes a missing one for the border of the slide, and programs that cut the
    border off would shift the overlay.
    """
    empty = zlib.compress(paint(np.full((TILE, TILE), np.nan)).tobytes())
    for top in range(0, size[1], TILE):
        for left in range(0, size[0], TILE):
            window = Window(*(Level0Pixels(length * step) for length in (left, top, TILE, TILE)))
            if tiles_in(scores, window).any():
                yield zlib.compress(paint(heat(scores, window, (TILE, TILE))).tobytes())
            else:
                yield empty


def _resolution(mpp: float) -> dict[str, Any]:
    if not math.isfinite(mpp):
        return {}
    return {"resolution": (1e4 / mpp, 1e4 / mpp), "resolutionunit": "CENTIMETER"}


def _describe(
    scores: BagScores, ground: Ground, sample: NDArray[Any], size: tuple[int, int], title: str, facts: dict[str, str]
) -> bytes:
    """The OME-XML of the first page."""
    samples = sample.shape[2:]
    facts = {
        "bag": _xml_text(scores.bag_id),
        "model": title,
        "bag probability": f"{scores.probability:.6f}",
        "level-0 pixels per pixel": str(ground.factor),
        "level-0 width": str(ground.size[0]),
        "level-0 height": str(ground.size[1]),
        **facts,
    }
    scale: dict[str, Any] = {}
    if math.isfinite(ground.mpp_level0):
        for axis in "XY":
            scale |= {f"PhysicalSize{axis}": ground.mpp_level0 * ground.factor, f"PhysicalSize{axis}Unit": "µm"}
    identity = uuid.uuid5(_NAMESPACE, repr((facts, scale, sample.dtype.str)))
    xml = tifffile.OmeXml(Creator=f"its2clr {__version__}", UUID=str(identity))
    width, height = size
    xml.addimage(
        sample.dtype,
        (height, width, *samples),
        (1, 1, 1, height, width, *(samples or (1,))),
        axes="YXS" if samples else "YX",
        Name=f"{facts['bag']}: {title}",
        Description="; ".join(f"{name}: {value}" for name, value in facts.items()),
        MapAnnotation={"Namespace": "its2clr/overlay", **facts},
        **scale,
    )
    return xml.tostring().encode("utf-8")


def _xml_text(text: str) -> str:
    """Text without the control characters that XML cannot hold."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def _link_levels(path: Path) -> None:
    """Chain the pages of a BigTIFF that are SubIFDs of the first one behind it."""
    with tifffile.TiffFile(path) as file:
        order, first = file.byteorder, file.pages.first
        offsets = [first.offset, *(first.subifds or ())]
    with path.open("r+b") as raw:
        for offset, following in itertools.pairwise(offsets):
            raw.seek(offset)
            (entries,) = struct.unpack(f"{order}Q", raw.read(8))
            raw.seek(offset + 8 + 20 * entries)  # behind the entries: where the next page is
            raw.write(struct.pack(f"{order}Q", following))

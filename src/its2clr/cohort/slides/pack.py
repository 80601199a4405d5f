"""Turn one slide into one tile file and one picture; this runs on the workers."""

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from its2clr.cohort.image_files import Resize, encode_tile
from its2clr.cohort.layout import BAGS_FILE, Encoding, tile_path
from its2clr.cohort.slides.glass import Glass
from its2clr.cohort.slides.manifest import Slide
from its2clr.cohort.slides.overview import Overview, overview_path
from its2clr.cohort.slides.scale import slide_mpp
from its2clr.cohort.slides.slide_image import SlideProblem, SlideReader, open_slide
from its2clr.cohort.slides.slide_stain import SlideStain
from its2clr.cohort.slides.spool import Spool
from its2clr.cohort.slides.tiler import cut_tiles, plan_tiles, read_thumbnail, read_tile
from its2clr.cohort.slides.tissue import TissueTest
from its2clr.cohort.tiles import read_tiles, write_tile_file
from its2clr.errors import InputError

if TYPE_CHECKING:
    from its2clr.cohort.slides.shapes import Annotations
    from its2clr.cohort.slides.stain import StainMethod

_FINGERPRINT, _IDENTITY, _NOTES = "fingerprint", "identity", "notes"
_MISLEADS = "its coarse level does not show what its tiles hold, so every tile was read"


@dataclass(frozen=True)
class SlideSettings:
    """How slides become tiles.

    Attributes:
        mpp: Microns per pixel of the tiles.
        tile_size: Pixels of the square tiles.
        overlap: Pixels of the stored tile that neighbours share.
        resize: How pixels are interpolated.
        min_saturation: The mean HSV saturation a tile must have, of 255.
        min_tissue: The share of its pixels that must be that saturated.
        min_covered: The share of a tile that must be annotated for it to count as positive; a tile with less, but
            not nothing, is unknown. 0: any tumour makes a tile positive, as in the paper.
        classes: Annotated classes that count as tumour; none named: those that are known to.
        stain: Stain normalisation of the kept tiles.
        default_mpp: Scale of slides where neither file nor manifest says.
        encoding: How tiles are stored.
        quality: JPEG quality.
        skip_glass: Whether to pass over what the thumbnail shows to be bare glass; if not, every tile is read.
    """

    mpp: float
    tile_size: int = 224
    overlap: int = 0
    resize: Resize = "bilinear"
    min_saturation: float = 30.0
    min_tissue: float = 0.0
    min_covered: float = 0.0
    classes: tuple[str, ...] = ()
    stain: "StainMethod | None" = None
    default_mpp: float | None = None
    encoding: Encoding = "jpeg"
    quality: int = 95
    skip_glass: bool = True


@dataclass(frozen=True)
class TileCounts:
    """What became of the places of a grid.

    Attributes:
        kept: Tiles in the cohort.
        glass: Passed over as bare glass.
        low_saturation: Read, and below the saturation asked for.
        low_tissue: Read, and below the share of tissue asked for.
    """

    kept: int = 0
    glass: int = 0
    low_saturation: int = 0
    low_tissue: int = 0


@dataclass(frozen=True)
class SlideResult:
    """What became of one slide.

    Attributes:
        counts: Its tiles.
        problem: Why it was left out; None if it is in the cohort.
        skipped: Whether it was there already, whole.
        notes: What a person should know of it, though it is in the cohort.
        identity: The same for copies of one slide; "" if not known.
    """

    counts: TileCounts
    problem: str | None = None
    skipped: bool = False
    notes: tuple[str, ...] = ()
    identity: str = ""


def finished(slide: Slide, out: Path, settings: SlideSettings) -> SlideResult | None:
    """What is there of a slide, if it is whole and was made from this file with these settings."""
    path = tile_path(out, slide.bag_id)
    if not path.exists() or not overview_path(out, slide.bag_id).exists():
        return None
    try:
        tiles = read_tiles(path)
    except InputError:
        return None
    if tiles.attributes.get(_FINGERPRINT) != _fingerprint(slide, settings):
        return None
    dropped = {name: int(tiles.attributes.get(f"n_{name}", 0)) for name in ("glass", "low_saturation", "low_tissue")}
    notes = tuple(json.loads(tiles.attributes.get(_NOTES, "[]")))
    identity = str(tiles.attributes.get(_IDENTITY, ""))
    return SlideResult(TileCounts(len(tiles), **dropped), skipped=True, notes=notes, identity=identity)


def pack_slide(slide: Slide, out: Path, settings: SlideSettings) -> SlideResult:
    """Tile one slide; whole, or not at all.

    Returns:
        The counts, or why the slide was left out.

    Raises:
        OSError: If the cohort folder cannot be written.
    """
    try:
        with open_slide(slide.file) as reader, Spool(tile_path(out, slide.bag_id).parent) as spool:
            return _pack(slide, reader, spool, out, settings)
    except SlideProblem as problem:
        tile_path(out, slide.bag_id).unlink(missing_ok=True)
        overview_path(out, slide.bag_id).unlink(missing_ok=True)
        return SlideResult(TileCounts(), str(problem))
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(out)) from error  # a full disk does not say where it is


def _pack(slide: Slide, reader: SlideReader, spool: Spool, out: Path, settings: SlideSettings) -> SlideResult:
    fingerprint = _fingerprint(slide, settings)
    mpp = slide_mpp(reader.mpp, slide.mpp, settings.default_mpp)
    plan = plan_tiles(reader, mpp, settings.mpp, settings.tile_size, settings.overlap)
    annotations = _read_ground_truth(slide, reader, settings.classes)
    test = TissueTest(settings.min_saturation, settings.min_tissue)
    grid = plan.coords()
    thumbnail = read_thumbnail(reader, plan)
    glass = Glass(thumbnail, grid, plan.side, test.min_saturation) if thumbnail and settings.skip_glass else None
    overview = Overview(reader.levels[0], plan, None if thumbnail is None else thumbnail.image)
    stain = None if settings.stain is None else SlideStain(settings.stain)
    seen: Counter[str] = Counter()
    kept: list[int] = []
    for tile in cut_tiles(reader, plan, test, settings.resize, glass):
        seen[tile.verdict] += 1
        overview.add(tile.image, *grid[tile.number].tolist())
        if tile.verdict == "kept":
            kept.append(tile.number)
            if stain is None:
                spool.append(encode_tile(tile.image, settings.encoding, settings.quality))
            else:
                stain.add(tile.image)
    counts = TileCounts(glass=len(grid) - seen.total(), **seen)
    if not kept:
        asked = f"a mean saturation of {test.min_saturation:g}"
        asked += f" and {test.min_tissue:.0%} tissue" if test.min_tissue else ""
        raise SlideProblem(f"has no tissue: none of its {len(grid)} tiles has {asked}")
    order = np.argsort(kept)
    coords = grid[kept][order]
    if stain is None:
        spool.arrange(order.tolist())
    else:  # its stains are known only now, so kept tiles are read once more
        for x, y in coords.tolist():
            image = stain.normalise(read_tile(reader, plan, x, y, settings.resize))
            spool.append(encode_tile(image, settings.encoding, settings.quality))
    labels, doubts = _label_tiles(slide, annotations, coords, plan.side, settings.min_covered)
    notes = [
        *doubts,
        *(annotations.notes if annotations is not None else ()),
        *([stain.note] if stain and stain.note else []),
    ]
    if glass and glass.misleads:
        notes.append(_MISLEADS)
        overview.distrust()
    # while slides are being written the folder is not complete, so it must not look so
    (out / BAGS_FILE).unlink(missing_ok=True)
    overview.save(overview_path(out, slide.bag_id), coords, None if annotations is None else annotations.tumour)
    write_tile_file(
        tile_path(out, slide.bag_id),
        spool,
        coords,
        [f"x{x}_y{y}" for x, y in coords.tolist()],
        labels,
        bag_id=slide.bag_id,
        tile_size=plan.tile_size,
        tile_size_level0=plan.side,
        mpp=plan.mpp,
        source=str(slide.file),
        encoding=settings.encoding,
        attributes={
            _FINGERPRINT: fingerprint,
            _NOTES: json.dumps(notes),
            _IDENTITY: reader.identity,
            "mpp_level0": mpp,
            "step_level0": plan.step,
            "overlap": settings.overlap,
            "annotation": "" if slide.annotation is None else str(slide.annotation),
            **{f"n_{name}": count for name, count in asdict(counts).items()},
        },
    )
    return SlideResult(counts, notes=tuple(notes), identity=reader.identity)


def _read_ground_truth(slide: Slide, reader: SlideReader, classes: tuple[str, ...]) -> "Annotations | None":
    if slide.annotation is None:
        return None
    from its2clr.cohort.slides.ground_truth import read_ground_truth

    return read_ground_truth(slide, reader.levels[0], classes)


def _label_tiles(
    slide: Slide,
    annotations: "Annotations | None",
    coords: npt.NDArray[np.int64],
    side: int,
    min_covered: float,
) -> tuple[npt.NDArray[np.int8] | None, tuple[str, ...]]:
    if slide.unannotated is None:
        return None, ()
    from its2clr.cohort.slides.ground_truth import label_tiles

    return label_tiles(slide, annotations, coords, side, min_covered)


def _fingerprint(slide: Slide, settings: SlideSettings) -> str:
    """Changes when the settings, the slide, its annotation or what the manifest says of it changes."""
    content = [
        asdict(settings),
        slide.bag_id,
        slide.mpp,
        slide.unannotated,
        _stamp(slide.file),
        None if slide.annotation is None else [str(slide.annotation), _stamp(slide.annotation)],
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns

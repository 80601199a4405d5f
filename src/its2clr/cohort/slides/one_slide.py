"""Turn one slide into one tile file and one picture; this runs on the workers."""

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, overload

import numpy as np

from its2clr import far
from its2clr.cohort.image_files import Resize, encode_tile
from its2clr.cohort.layout import Encoding, LeftOut, tile_path
from its2clr.cohort.packing import FINGERPRINT, BagResult, file_stamp, fingerprint, path_to_write, whole_tile_file
from its2clr.cohort.slides.classes import shapes_of
from its2clr.cohort.slides.glass import Glass
from its2clr.cohort.slides.ground_truth import label_tiles, read_ground_truth
from its2clr.cohort.slides.overview import Overview, overview_path
from its2clr.cohort.slides.quick_reads import quick_reads
from its2clr.cohort.slides.slide_image import SlideImage, SlideProblem, open_named_slide, slide_mpp
from its2clr.cohort.slides.slide_manifest import Slide
from its2clr.cohort.slides.tiler import cut_tiles, plan_tiles, read_thumbnail, read_tile
from its2clr.cohort.slides.tissue import TissueTest
from its2clr.cohort.tiles import write_tile_file
from its2clr.errors import Its2clrError
from its2clr.files import disk_full_said
from its2clr.units import MicronsPerPixel, TilePixels

if TYPE_CHECKING:
    from its2clr.cohort.slides.stain import StainMethod

_TILE_SIZE, _NO_OVERLAP = TilePixels(224), TilePixels(0)
_IDENTITY, _NOTES = "identity", "notes"
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

    mpp: MicronsPerPixel
    tile_size: TilePixels = _TILE_SIZE
    overlap: TilePixels = _NO_OVERLAP
    resize: Resize = "bilinear"
    min_saturation: float = 30.0
    min_tissue: float = 0.0
    min_covered: float = 0.0
    classes: tuple[str, ...] = ()
    stain: "StainMethod | None" = None
    default_mpp: MicronsPerPixel | None = None
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
class SlideResult(BagResult):
    """What became of one slide.

    Attributes:
        counts: Its tiles.
        identity: The same for copies of one slide; "" if not known.
    """

    counts: TileCounts = TileCounts()
    identity: str = ""


def finished(slide: Slide, out: Path, settings: SlideSettings) -> SlideResult | None:
    """What is there of a slide, if it is whole and was made from this file with these settings."""
    tiles = whole_tile_file(out, slide.bag_id, _fingerprint(slide, settings))
    if tiles is None or not overview_path(out, slide.bag_id).exists():
        return None
    dropped = {name: int(tiles.attributes.get(f"n_{name}", 0)) for name in ("glass", "low_saturation", "low_tissue")}
    return SlideResult(
        len(tiles),
        notes=tuple(json.loads(tiles.attributes.get(_NOTES, "[]"))),
        counts=TileCounts(len(tiles), **dropped),
        identity=str(tiles.attributes.get(_IDENTITY, "")),
    )


def pack_slide(slide: Slide, out: Path, settings: SlideSettings) -> SlideResult:
    """Tile one slide; whole, or not at all.

    Returns:
        The counts, or why the slide was left out.

    Raises:
        DiskFullError: If there is no room in the cohort folder.
        OSError: If it cannot be written for another reason.
    """
    path = tile_path(out, slide.bag_id)
    try:
        with (
            disk_full_said(path),
            open_named_slide(slide.file) as opened,
            quick_reads(opened) as image,
            Spool(path.parent) as spool,
        ):
            return _pack(slide, image, spool, out, settings)
    except Exception as error:
        if isinstance(error, Its2clrError | OSError):  # of writing: what is read raises a SlideProblem
            raise
        overview_path(out, slide.bag_id).unlink(missing_ok=True)
        reason = " ".join(str(error).split()) or type(error).__name__
        return left_out(slide, reason if isinstance(error, SlideProblem) else f"cannot be tiled: {reason}")


def left_out(slide: Slide, problem: str) -> SlideResult:
    """The result of a slide that cannot be used."""
    return SlideResult(left_out=(LeftOut(slide.bag_id, slide.name, slide.row, problem),))


def _pack(slide: Slide, image: SlideImage, spool: "Spool", out: Path, settings: SlideSettings) -> SlideResult:
    made_from = _fingerprint(slide, settings)  # before pixels are read: a slide that changes meanwhile is tiled again
    mpp = _scale(slide, image, settings)
    plan = plan_tiles(image, mpp, settings.mpp, settings.tile_size, settings.overlap)
    annotations = read_ground_truth(slide, image.levels[0], settings.classes)
    test = TissueTest(settings.min_saturation, settings.min_tissue)
    grid = plan.coords()
    thumbnail = read_thumbnail(image, plan)
    glass = Glass(thumbnail, grid, plan.side, test.min_saturation) if thumbnail and settings.skip_glass else None
    overview = Overview(image.levels[0], plan, None if thumbnail is None else thumbnail.image)
    stain = None
    if settings.stain is not None:
        from its2clr.cohort.slides.stain import SlideStain  # with torch, which no other slide needs

        stain = SlideStain(settings.stain)
    seen: Counter[str] = Counter()
    kept: list[int] = []
    for tile in cut_tiles(image, plan, test, settings.resize, glass):
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
            normalised = stain.normalise(read_tile(image, plan, x, y, settings.resize))
            spool.append(encode_tile(normalised, settings.encoding, settings.quality))
    labels, doubts = label_tiles(slide, annotations, coords, plan.side, settings.min_covered)
    notes = [
        *doubts,
        *(annotations.notes if annotations is not None else ()),
        *([stain.note] if stain and stain.note else []),
    ]
    if glass and glass.misleads:
        notes.append(_MISLEADS)
        overview.distrust()
    path = path_to_write(out, slide.bag_id)
    overview.add_margins(image)
    overview.save(overview_path(out, slide.bag_id), coords, None if annotations is None else annotations.tumour)
    write_tile_file(
        path,
        spool,
        coords,
        [f"x{x}_y{y}" for x, y in coords.tolist()],
        labels,
        bag_id=slide.bag_id,
        tile_size=plan.tile_size,
        tile_size_level0=plan.side,
        mpp=plan.mpp,
        source=far.address_of(slide.file),
        encoding=settings.encoding,
        attributes={
            FINGERPRINT: made_from,
            _NOTES: json.dumps(notes),
            _IDENTITY: image.identity,
            "mpp_level0": mpp,
            "step_level0": plan.step,
            "overlap": settings.overlap,
            "annotation": "" if slide.annotation is None else str(slide.annotation),
            **{f"n_{name}": count for name, count in asdict(counts).items()},
        },
    )
    return SlideResult(counts.kept, notes=tuple(notes), counts=counts, identity=image.identity)


def _scale(slide: Slide, image: SlideImage, settings: SlideSettings) -> MicronsPerPixel:
    """The scale of level 0; where it is unknown, the problem says what the annotation says."""
    try:
        return slide_mpp(image.mpp, slide.mpp, settings.default_mpp)
    except SlideProblem as problem:
        shapes = None if slide.annotation is None else shapes_of(slide.annotation)
        if shapes is None or shapes.mpp is None:
            raise
        said = f"its annotation says {shapes.mpp:g} um/px, which --annotation-mpp takes"
        raise SlideProblem(f"{problem} ({said})") from problem


def _fingerprint(slide: Slide, settings: SlideSettings) -> str:
    """Changes when the settings, the slide, its annotation or what the manifest says of it changes."""
    annotation = None if slide.annotation is None else [str(slide.annotation), file_stamp(slide.annotation)]
    return fingerprint(asdict(settings), slide.bag_id, slide.mpp, slide.unannotated, file_stamp(slide.file), annotation)


class Spool(Sequence[bytes]):
    """The encoded tiles of a slide, in a nameless file: memory does not grow with the slide.

    What it holds vanishes with it, even when the process is killed.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder, prefix=".", suffix=".part")  # noqa: SIM115 - closed by __exit__
        self._end = 0
        self._places: list[tuple[int, int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, content: bytes) -> None:
        """Add one at the end."""
        self._file.seek(self._end)
        self._file.write(content)
        self._places.append((self._end, len(content)))
        self._end += len(content)

    def arrange(self, order: Sequence[int]) -> None:
        """Put them in another order: the one that is now `order[0]` comes first."""
        self._places = [self._places[number] for number in order]

    def __len__(self) -> int:
        """How many were added."""
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        """Read one back, or several."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        start, size = self._places[index]
        self._file.seek(start)
        return self._file.read(size)

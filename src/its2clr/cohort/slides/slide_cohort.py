"""Make a cohort of whole slides: settings checked, slides spread over processes, closing words."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from its2clr.cluster.place import Cluster
from its2clr.cluster.workers import WorkersDied
from its2clr.cohort.image_files import check_tile_settings
from its2clr.cohort.layout import PROBLEMS_FILE, CohortInfo
from its2clr.cohort.packing import PackSummary, SplitPlan, pack_cohort
from its2clr.cohort.slides.classes import check_chosen_classes
from its2clr.cohort.slides.cluster import spread
from its2clr.cohort.slides.one_slide import SlideResult, SlideSettings, TileCounts, finished, left_out, pack_slide
from its2clr.cohort.slides.slide_image import check_mpp
from its2clr.cohort.slides.slide_manifest import Slide, SlideManifest
from its2clr.cohort.slides.tissue import TissueTest
from its2clr.cohort.splits import DEFAULT_FRACTIONS
from its2clr.errors import InputError
from its2clr.files import remove_half_written
from its2clr.units import MicronsPerPixel, mpp_of_magnification
from its2clr.wording import shortened_lines

SlideProgress = Callable[[int, int, int], None]
"""Called with the slides this run has done, those it has to do, and the tiles it has kept."""

_DIED = "its worker died each time it was tried: too little memory, or a file that crashes the decoder"


@dataclass(frozen=True)
class SlideSummary(PackSummary):
    """What tiling did.

    Attributes:
        counts: What became of the tiles of all slides in the cohort.
        notes: What a person should know of slides that are in the cohort, by bag.
    """

    counts: TileCounts
    notes: tuple[tuple[str, str], ...] = ()

    def lines(self) -> list[str]:
        """The closing words: slides done, tiles kept and dropped, slides left out, and why."""
        counts = self.counts
        reasons = {
            "bare glass on the thumbnail": counts.glass,
            "too little saturation": counts.low_saturation,
            "too little tissue": counts.low_tissue,
        }
        dropped = ", ".join(f"{count} for {reason}" for reason, count in reasons.items() if count)
        lines = [
            f"{self.path}: {self.n_bags} slides ({self.n_packed} tiled, {self.n_skipped} there), {counts.kept} tiles",
            f"tiles dropped: {dropped or 'none'}",
        ]
        if self.left_out:
            lines.append(f"slides left out: {len(self.left_out)} ({self.path / PROBLEMS_FILE})")
            problems = shortened_lines([f"{one.bag_id}: {one.problem}" for one in self.left_out])
            lines += [f"  {line}" for line in problems]
        lines += [f"note: {self.remark}"] if self.remark else []
        notes = [f"note: {bag_id}: {note}" for bag_id, note in self.notes]
        return lines + shortened_lines(notes, more="more notes, each in attribute `notes` of its tile file")


def pack_slides(
    manifest: SlideManifest,
    out: Path,
    settings: SlideSettings,
    *,
    cluster: Cluster | None = None,
    workers: int | None = None,
    seed: int = 0,
    fractions: Sequence[float] = DEFAULT_FRACTIONS,
    progress: SlideProgress | None = None,
) -> SlideSummary:
    """Tile the slides of a manifest into a cohort folder.

    A slide that cannot be used is left out as a whole and listed in `problems.csv`; the rest goes on. The same
    call again skips the slides that are whole, so tiling goes on where it stopped, and tries again those that had
    problems.

    Args:
        manifest: The slides.
        out: The cohort folder; new, empty, or begun with the same settings. Workers write into it.
        settings: How slides become tiles.
        cluster: Where slides are tiled; processes of this machine if None.
        workers: Processes on this machine, where no cluster is given; the processors at hand if None.
        seed: Chooses the splits, if the manifest has none.
        fractions: Shares of train, val and test, if the manifest has no splits.
        progress: Called after each slide.

    Raises:
        InputError: If a setting is wrong, a class is in no annotation or of unknown meaning, the folder holds something
            else, no slide is left, or a split lacks a class because slides were left out.
        OSError: If the folder cannot be written.
    """
    check_slide_settings(settings)
    check_chosen_classes((slide.annotation for slide in manifest.slides), settings.classes, workers)
    out = Path(out).absolute()
    splits = SplitPlan(manifest, fractions, seed)
    info = CohortInfo(
        tile_size=settings.tile_size,
        encoding=settings.encoding,
        has_instance_labels=manifest.annotated,
        labelled=manifest.labelled,
        settings={
            **asdict(settings),
            "classes": list(settings.classes),
            "label": manifest.label,
            **splits.settings(),
        },
    )
    packed = pack_cohort(
        out,
        info,
        manifest.bags,
        {slide.bag_id: slide for slide in manifest.slides},
        finished=partial(finished, out=out, settings=settings),
        pack=partial(pack_slide, out=out, settings=settings),
        spread=partial(_on_workers, out=out, cluster=cluster or Cluster(workers=workers), progress=progress),
        splits=splits,
        left_out=manifest.left_out,
    )
    notes = (
        *_copies(packed.results),
        *((bag_id, note) for bag_id, result in packed.results.items() for note in result.notes),
    )
    return SlideSummary(**vars(packed.summary), counts=_add_up(packed.results.values()), notes=notes)


def target_mpp(magnification: float | None, mpp: float | None) -> MicronsPerPixel:
    """The microns per pixel of the tiles: `mpp`, or what the `magnification` stands for (5x is 2 um/px).

    Raises:
        InputError: If not exactly one of them is given, or it is out of range.
    """
    if (magnification is None) == (mpp is None):
        raise InputError("give the scale of the tiles as either --magnification or --mpp")
    if magnification is not None and not (math.isfinite(magnification) and magnification > 0):
        raise InputError(f"magnification must be above 0, got {magnification:g}")
    asked = mpp_of_magnification(magnification) if magnification is not None else MicronsPerPixel(mpp or 0.0)
    if not (math.isfinite(asked) and 0 < asked <= 100):
        raise InputError(f"mpp must be above 0 and at most 100 um/px, got {asked:g}")
    return asked


def check_slide_settings(settings: SlideSettings) -> None:
    """Check how slides are to become tiles.

    Raises:
        InputError: If a setting is out of range.
    """
    check_tile_settings(settings.tile_size, settings.encoding, settings.quality, settings.resize)
    TissueTest(settings.min_saturation, settings.min_tissue)
    if not 0 <= settings.overlap < settings.tile_size:
        raise InputError(f"overlap must be from 0 to below the tile size, got {settings.overlap}")
    if not 0 <= settings.min_covered <= 1:
        raise InputError(f"min_covered is a share, from 0 to 1, got {settings.min_covered:g}")
    if settings.default_mpp is not None:
        check_mpp(settings.default_mpp, "default_mpp")


def _on_workers(
    pack: Callable[[Slide], SlideResult],
    slides: Mapping[str, Slide],
    *,
    out: Path,
    cluster: Cluster,
    progress: SlideProgress | None,
) -> Iterator[tuple[str, SlideResult]]:
    """Tile slides in other processes; one whose workers died each time is left out."""
    tiles = 0
    with closing(spread(pack, slides, cluster)) as results:
        for done, (bag_id, result) in enumerate(results, start=1):
            outcome = left_out(slides[bag_id], _DIED) if isinstance(result, WorkersDied) else result
            tiles += outcome.n_instances
            if progress is not None:
                progress(done, len(slides), tiles)
            yield bag_id, outcome
    remove_half_written(out)  # what workers left that died in this run


def _copies(results: Mapping[str, SlideResult]) -> Iterator[tuple[str, str]]:
    """Notes on bags that hold the same slide under different names."""
    first: dict[str, str] = {}
    for bag_id, result in results.items():
        if result.identity and first.setdefault(result.identity, bag_id) != bag_id:
            yield bag_id, f"is the same slide as {first[result.identity]}; remove one of them from the manifest"


def _add_up(results: Iterable[SlideResult]) -> TileCounts:
    total: Counter[str] = Counter()
    for result in results:
        total.update(asdict(result.counts))
    return TileCounts(**total)

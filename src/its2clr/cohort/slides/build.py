"""Make a cohort of slides: what is whole is kept, the rest is spread over workers, and the folder is closed."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

from its2clr.cohort.finish import plan_splits, settle_splits
from its2clr.cohort.image_files import check_tile_settings
from its2clr.cohort.layout import (
    PROBLEMS_FILE,
    CohortInfo,
    LeftOut,
    claim_folder,
    write_bags,
    write_problems,
)
from its2clr.cohort.slides.cluster import WorkersDied, connect, map_on_workers
from its2clr.cohort.slides.manifest import Slide, SlideManifest
from its2clr.cohort.slides.pack import SlideResult, SlideSettings, TileCounts, finished, pack_slide
from its2clr.cohort.slides.scale import check_mpp
from its2clr.cohort.slides.tissue import TissueTest
from its2clr.cohort.splits import DEFAULT_FRACTIONS
from its2clr.errors import InputError
from its2clr.files import remove_half_written

SlideProgress = Callable[[int, int, int], None]
"""Called with the slides this run has done, those it has to do, and the tiles it has kept."""

_LISTED = 10
_DIED = "its worker died each time it was tried: too little memory, or a file that crashes the decoder"


@dataclass(frozen=True)
class SlideSummary:
    """What tiling did.

    Attributes:
        path: The cohort folder.
        n_bags: Slides in the cohort.
        n_packed: Slides tiled by this run.
        n_skipped: Slides that were already there, whole.
        counts: What became of the tiles of all slides in the cohort.
        left_out: Slides that are not in the cohort, and why.
        notes: What a person should know of slides that are, by bag.
    """

    path: Path
    n_bags: int
    n_packed: int
    n_skipped: int
    counts: TileCounts
    left_out: tuple[LeftOut, ...]
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
            lines += [f"  {one.bag_id}: {one.problem}" for one in self.left_out[:_LISTED]]
        if len(self.left_out) > _LISTED:
            lines.append(f"  and {len(self.left_out) - _LISTED} more")
        lines += [f"note: {bag_id}: {note}" for bag_id, note in self.notes[:_LISTED]]
        if len(self.notes) > _LISTED:
            lines.append(f"and {len(self.notes) - _LISTED} more notes, each in attribute `notes` of its tile file")
        return lines


def pack_slides(
    manifest: SlideManifest,
    out: Path,
    settings: SlideSettings,
    *,
    scheduler: str | None = None,
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
        out: The cohort folder; new, empty, or begun with the same settings. Dask workers write into it.
        settings: How slides become tiles.
        scheduler: Address of a Dask scheduler; a cluster on this machine if None.
        workers: Processes on this machine; the processors at hand if None.
        seed: Chooses the splits, if the manifest has none.
        fractions: Shares of train, val and test, if the manifest has no splits.
        progress: Called after each slide.

    Raises:
        InputError: If a setting is wrong, the folder holds something else, no slide is left, or a split lacks a
            class because slides were left out.
        OSError: If the folder cannot be written.
    """
    check_slide_settings(settings)
    out = Path(out).absolute()
    bags = manifest.bags
    claim_folder(
        out,
        CohortInfo(
            tile_size=settings.tile_size,
            encoding=settings.encoding,
            has_instance_labels=manifest.annotated,
            labelled=bags.labelled,
            settings={
                **asdict(settings),
                "classes": list(settings.classes),
                "label": manifest.label,
                **plan_splits(bags, fractions, seed),
            },
        ),
    )
    remove_half_written(out)
    results = _tile(manifest.slides, out, settings, scheduler, workers, progress)
    remove_half_written(out)  # what workers left that died in this run
    left_out = [
        *manifest.left_out,
        *(
            LeftOut(slide.bag_id, slide.name, slide.row, problem)
            for slide in manifest.slides
            if (problem := results[slide.bag_id].problem) is not None
        ),
    ]
    left_out.sort(key=lambda one: one.row)
    write_problems(out, left_out)
    table = bags.bags.assign(n_instances=[results[slide.bag_id].counts.kept for slide in manifest.slides])
    kept = settle_splits(table[table["n_instances"] > 0], bags, out, fractions, seed)
    write_bags(out, kept)
    skipped = sum(result.skipped for result in results.values())
    notes = (
        *_copies(manifest.slides, results),
        *((slide.bag_id, note) for slide in manifest.slides for note in results[slide.bag_id].notes),
    )
    counts = _add_up(results.values())
    return SlideSummary(out, len(kept), len(kept) - skipped, skipped, counts, tuple(left_out), notes)


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


def _tile(
    slides: Sequence[Slide],
    out: Path,
    settings: SlideSettings,
    scheduler: str | None,
    workers: int | None,
    progress: SlideProgress | None,
) -> dict[str, SlideResult]:
    """Tile what is not there yet."""
    results: dict[str, SlideResult] = {}
    waiting: dict[str, Slide] = {}
    for slide in slides:
        there = finished(slide, out, settings)
        if there is None:
            waiting[slide.bag_id] = slide
        else:
            results[slide.bag_id] = there
    if not waiting:
        return results
    done = tiles = 0
    with connect(scheduler, workers) as client:
        work = partial(pack_slide, out=out, settings=settings)
        for bag_id, result in map_on_workers(client, work, waiting):
            outcome = SlideResult(TileCounts(), _DIED) if isinstance(result, WorkersDied) else result
            results[bag_id] = outcome
            done, tiles = done + 1, tiles + outcome.counts.kept
            if progress is not None:
                progress(done, len(waiting), tiles)
    return results


def _copies(slides: Iterable[Slide], results: Mapping[str, SlideResult]) -> Iterator[tuple[str, str]]:
    """Notes on bags that hold the same slide under different names."""
    first: dict[str, str] = {}
    for slide in slides:
        identity = results[slide.bag_id].identity
        if identity and first.setdefault(identity, slide.bag_id) != slide.bag_id:
            yield slide.bag_id, f"is the same slide as {first[identity]}; remove one of them from the manifest"


def _add_up(results: Iterable[SlideResult]) -> TileCounts:
    total: Counter[str] = Counter()
    for result in results:
        total.update(asdict(result.counts))
    return TileCounts(**{field.name: total[field.name] for field in fields(TileCounts)})

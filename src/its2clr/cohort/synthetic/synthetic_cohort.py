"""The embedded cohort: synthetic slides of known truth, in the same format as any other cohort.

A slide depends on the seed, its number and the settings only, never on how many processes drew it.
"""

import io
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from PIL import Image
from pydantic import ValidationError

from its2clr.cohort.layout import CohortInfo, tile_path
from its2clr.cohort.packing import BagResult, pack_cohort, path_to_write
from its2clr.cohort.parallel import Progress, default_workers
from its2clr.cohort.synthetic.drawing import TissueSettings, render_slide
from its2clr.cohort.tiles import write_tile_file
from its2clr.errors import InputError
from its2clr.processes import without_script
from its2clr.signals import interrupts_wait, leave_signals_to_parent
from its2clr.units import Level0Pixels, MicronsPerPixel, TilePixels
from its2clr.wording import did_you_mean

SizeName = Literal["tiny", "small", "medium", "large"]

SOURCE = "synthetic"
DRAWING_VERSION = 3
"""Raised whenever the same settings would give another picture."""

_POOL_WORTHWHILE = 20_000_000  # pixels; fewer are drawn sooner than processes start


class CohortSize(NamedTuple):
    """How many bags go to each split, and the tiles of a bag."""

    train: int
    val: int
    test: int
    grid: tuple[int, int]
    tile_size: TilePixels
    mpp: MicronsPerPixel


_COARSE, _FINE = (TilePixels(32), MicronsPerPixel(1.0)), (TilePixels(64), MicronsPerPixel(0.5))
SIZES: dict[SizeName, CohortSize] = {
    "tiny": CohortSize(24, 16, 16, (4, 4), *_COARSE),
    "small": CohortSize(120, 60, 100, (6, 6), *_COARSE),
    "medium": CohortSize(240, 80, 160, (10, 10), *_FINE),
    "large": CohortSize(400, 120, 240, (14, 14), *_FINE),
}


@dataclass(frozen=True)
class SyntheticSummary:
    """What a synthetic cohort holds."""

    folder: Path
    bags: int
    positive_bags: int
    instances: int
    drawn: int  # bags drawn by this call; 0 when everything was there


class _BagPlan(NamedTuple):
    number: int
    bag_id: str
    label: int
    split: str
    group: str


def make_synthetic(
    out: str | Path,
    *,
    size: SizeName = "small",
    seed: int = 0,
    workers: int | None = None,
    progress: Progress | None = None,
    **overrides: Any,
) -> SyntheticSummary:
    """Draw a synthetic cohort into a folder; drawing the same again does nothing.

    Args:
        out: Folder of the cohort; made when missing.
        size: Name in `SIZES`.
        seed: Another seed gives other slides of the same kind.
        workers: Processes to draw with; 1 draws in this one, None uses every core when that is worth it.
        progress: Called with the number of bags done and of all bags.
        **overrides: Fields of `TissueSettings` that differ from the size's defaults, such as `evidence=0.6`.

    Returns:
        A summary of the cohort.

    Raises:
        InputError: Unknown size or setting, or the folder holds a cohort made with other settings.
    """
    out = Path(out)
    if workers is not None and workers < 1:
        raise InputError(f"workers must be at least 1, got {workers}")
    settings = synthetic_settings(size, **overrides)
    plans = _plan_bags(SIZES[size], seed)
    tiles_per_bag = settings.grid[0] * settings.grid[1]
    wanted = {"source": SOURCE, "drawing": DRAWING_VERSION, "size": size, "seed": seed}
    packed = pack_cohort(
        out,
        CohortInfo(
            tile_size=settings.tile_size,
            encoding="png",
            has_instance_labels=True,
            settings=wanted | settings.model_dump(mode="json"),
        ),
        pd.DataFrame(plans).drop(columns="number").assign(n_instances=tiles_per_bag),
        {plan.bag_id: plan for plan in plans},
        finished=lambda plan: BagResult(tiles_per_bag) if tile_path(out, plan.bag_id).exists() else None,
        pack=partial(_draw_bag, out=out, settings=settings, seed=seed),
        spread=partial(_in_processes, tile_pixels=tiles_per_bag * settings.tile_size**2, workers=workers),
        progress=progress,
    ).summary
    return SyntheticSummary(
        folder=out,
        bags=packed.n_bags,
        positive_bags=sum(plan.label for plan in plans),
        instances=packed.n_instances,
        drawn=packed.n_packed,
    )


def synthetic_settings(size: SizeName, **overrides: Any) -> TissueSettings:
    """The tissue settings of a size, with some of them replaced."""
    if size not in SIZES:
        raise InputError(f"unknown size {size!r} of the synthetic cohort; sizes are {', '.join(get_args(SizeName))}")
    known = TissueSettings.model_fields
    for name in overrides:
        if name not in known:
            hint = did_you_mean(name, known, else_list=True)
            raise InputError(f"unknown setting {name!r} of the synthetic cohort{hint}")
    shape = SIZES[size]
    values = {"grid": shape.grid, "tile_size": shape.tile_size, "mpp": shape.mpp, **overrides}
    try:
        return TissueSettings(**values)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, item['loc'])) or 'settings'}: {item['msg']}" for item in error.errors()]
        raise InputError("the synthetic cohort cannot be drawn so:\n  " + "\n  ".join(lines)) from error


def slide_generator(seed: int, number: int) -> np.random.Generator:
    """The source of randomness of slide `number`, independent of every other slide's."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1, number)))


def _plan_bags(size: CohortSize, seed: int) -> list[_BagPlan]:
    """Labels, splits and patients of all bags; half of each split is positive.

    About one patient in ten has two slides, which share label and split.
    """
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0,)))
    plans: list[_BagPlan] = []
    patients = 0
    for split, count in (("train", size.train), ("val", size.val), ("test", size.test)):
        slides: list[tuple[int, int]] = []  # (label, number of the patient among those of this label)
        for label, members in ((0, count - count // 2), (1, count // 2)):
            pairs = max(1, members // 10)
            slides += [(label, slide % (members - pairs)) for slide in range(members)]
        names: dict[tuple[int, int], str] = {}
        for position in rng.permutation(count):
            patient = slides[position]
            if patient not in names:
                names[patient] = f"patient_{patients:03d}"
                patients += 1
            number = len(plans)
            plans.append(_BagPlan(number, f"slide_{number:03d}", patient[0], split, names[patient]))
    return plans


def _in_processes(
    draw: Callable[[_BagPlan], BagResult], plans: Mapping[str, _BagPlan], *, tile_pixels: int, workers: int | None
) -> Iterator[tuple[str, BagResult]]:
    """Draw bags of so many pixels, in this process where few are to be drawn."""
    if workers is None:
        workers = default_workers() if len(plans) * tile_pixels > _POOL_WORTHWHILE else 1
    workers = min(workers, len(plans))
    if workers <= 1:
        yield from ((bag_id, draw(plan)) for bag_id, plan in plans.items())
        return
    # Not forked: the caller may hold threads (BLAS, a device) that do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=leave_signals_to_parent) as pool:
        try:
            with interrupts_wait(), without_script():  # a worker that is still starting would die of them
                futures = {pool.submit(draw, plan): bag_id for bag_id, plan in plans.items()}
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _draw_bag(plan: _BagPlan, *, out: Path, settings: TissueSettings, seed: int) -> BagResult:
    """Render one slide, cut it into tiles and write its tile file."""
    slide = render_slide(slide_generator(seed, plan.number), settings, positive=bool(plan.label))
    rows, cols = np.divmod(np.arange(slide.labels.size), settings.grid[1])
    write_tile_file(
        path_to_write(out, plan.bag_id),
        [_png(tile) for tile in cut_tiles(slide.image, settings.tile_size)],
        coords=np.stack([cols, rows], axis=1).astype(np.int64) * settings.tile_size,
        names=[f"r{row:02d}c{col:02d}" for row, col in zip(rows, cols, strict=True)],
        labels=slide.labels.ravel(),
        bag_id=plan.bag_id,
        tile_size=settings.tile_size,
        tile_size_level0=Level0Pixels(settings.tile_size),
        mpp=settings.mpp,
        source=f"synthetic slide {plan.number} of seed {seed}",
        encoding="png",
    )
    return BagResult(slide.labels.size)


def cut_tiles(image: NDArray[np.uint8], tile_size: TilePixels) -> NDArray[np.uint8]:
    """Cut a picture into its tiles, row by row: (H, W, 3) -> (rows * cols, tile_size, tile_size, 3)."""
    rows, cols = image.shape[0] // tile_size, image.shape[1] // tile_size
    tiles = image.reshape(rows, tile_size, cols, tile_size, 3).swapaxes(1, 2)
    return tiles.reshape(rows * cols, tile_size, tile_size, 3)


def _png(tile: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(tile).save(buffer, format="PNG")
    return buffer.getvalue()

"""Writes the embedded cohort: synthetic slides of known truth, in the same format as any other cohort.

Slide `i` depends on the seed, its number and the settings only, never on how many processes drew it.
`bags.csv` is written last, so a folder that has it is complete; running again continues what was interrupted.
"""

import difflib
import io
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from PIL import Image
from pydantic import ValidationError

from its2clr.cohort.layout import BAGS_FILE, CohortInfo, claim_folder, tile_path, write_bags, write_problems
from its2clr.cohort.parallel import Progress, default_workers
from its2clr.cohort.synthetic.drawing import TissueSettings, render_slide
from its2clr.cohort.tiles import write_tile_file
from its2clr.errors import InputError

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
    tile_size: int
    mpp: float


SIZES: dict[SizeName, CohortSize] = {
    "tiny": CohortSize(24, 16, 16, grid=(4, 4), tile_size=32, mpp=1.0),
    "small": CohortSize(120, 60, 100, grid=(6, 6), tile_size=32, mpp=1.0),
    "medium": CohortSize(240, 80, 160, grid=(10, 10), tile_size=64, mpp=0.5),
    "large": CohortSize(400, 120, 240, grid=(14, 14), tile_size=64, mpp=0.5),
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
    wanted = {"source": SOURCE, "drawing": DRAWING_VERSION, "size": size, "seed": seed}
    wanted |= settings.model_dump(mode="json")
    claim_folder(
        out, CohortInfo(tile_size=settings.tile_size, encoding="png", has_instance_labels=True, settings=wanted)
    )

    pending = [plan for plan in plans if not tile_path(out, plan.bag_id).exists()]
    done = len(plans) - len(pending)
    if progress is not None:
        progress(done, len(plans))
    for _ in _draw_all(out, pending, settings, seed, workers):
        done += 1
        if progress is not None:
            progress(done, len(plans))

    tiles_per_bag = settings.grid[0] * settings.grid[1]
    if not (out / BAGS_FILE).exists():
        write_problems(out, [])
        bags = pd.DataFrame(plans).drop(columns="number")
        write_bags(out, bags.assign(n_instances=tiles_per_bag))
    return SyntheticSummary(
        folder=out,
        bags=len(plans),
        positive_bags=sum(plan.label for plan in plans),
        instances=len(plans) * tiles_per_bag,
        drawn=len(pending),
    )


def synthetic_settings(size: SizeName, **overrides: Any) -> TissueSettings:
    """The tissue settings of a size, with some of them replaced."""
    if size not in SIZES:
        raise InputError(f"unknown size {size!r} of the synthetic cohort; sizes are {', '.join(get_args(SizeName))}")
    for name in overrides:
        if name not in TissueSettings.model_fields:
            close = difflib.get_close_matches(name, TissueSettings.model_fields, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(TissueSettings.model_fields)}"
            raise InputError(f"unknown setting {name!r} of the synthetic cohort; {hint}")
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


def _draw_all(
    out: Path, plans: list[_BagPlan], settings: TissueSettings, seed: int, workers: int | None
) -> Iterator[None]:
    """Draw the bags, one step of the iterator for each as it is done."""
    if workers is None:
        pixels = len(plans) * settings.grid[0] * settings.grid[1] * settings.tile_size**2
        workers = default_workers() if pixels > _POOL_WORTHWHILE else 1
    workers = min(workers, len(plans))
    if workers <= 1:
        for plan in plans:
            _draw_bag(out, plan, settings, seed)
            yield
        return
    # Not forked: the caller may hold threads (BLAS, a device) that do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = [pool.submit(_draw_bag, out, plan, settings, seed) for plan in plans]
        try:
            for future in as_completed(futures):
                future.result()
                yield
        finally:
            pool.shutdown(cancel_futures=True)


def _draw_bag(out: Path, plan: _BagPlan, settings: TissueSettings, seed: int) -> None:
    """Render one slide, cut it into tiles and write its tile file."""
    slide = render_slide(slide_generator(seed, plan.number), settings, positive=bool(plan.label))
    rows, cols = np.divmod(np.arange(slide.labels.size), settings.grid[1])
    write_tile_file(
        tile_path(out, plan.bag_id),
        [_png(tile) for tile in cut_tiles(slide.image, settings.tile_size)],
        coords=np.stack([cols, rows], axis=1).astype(np.int64) * settings.tile_size,
        names=[f"r{row:02d}c{col:02d}" for row, col in zip(rows, cols, strict=True)],
        labels=slide.labels.ravel(),
        bag_id=plan.bag_id,
        tile_size=settings.tile_size,
        tile_size_level0=settings.tile_size,
        mpp=settings.mpp,
        source=f"synthetic slide {plan.number} of seed {seed}",
        encoding="png",
    )


def cut_tiles(image: NDArray[np.uint8], tile_size: int) -> NDArray[np.uint8]:
    """Cut a picture into its tiles, row by row: (H, W, 3) -> (rows * cols, tile_size, tile_size, 3)."""
    rows, cols = image.shape[0] // tile_size, image.shape[1] // tile_size
    tiles = image.reshape(rows, tile_size, cols, tile_size, 3).swapaxes(1, 2)
    return tiles.reshape(rows * cols, tile_size, tile_size, 3)


def _png(tile: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(tile).save(buffer, format="PNG")
    return buffer.getvalue()

"""Tiles per second of `its2clr cohort slides` against a bare loop that reads, filters and encodes the same tiles.

    python benchmarks/tiling.py [--slides 12] [--side 6000] [--out tiling.json]

Everything is measured in one run on the same slides, the bare loop and one worker in turns: ratios, not absolute
numbers, are the result. The slides are drawn: JPEG pyramids of textured tissue on glass. The bare loop is what one
would write by hand with OpenSlide and Pillow, for just the tiles that the command reads (not the glass it skips).
Starting the worker processes is measured apart and taken off. On a machine that is busy with other
things two cores are not twice one: `two_bare_loops_to_one` says what two independent processes gain there.
"""

import argparse
import io
import json
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import openslide
import tifffile
from PIL import Image

from its2clr.cluster.place import Cluster
from its2clr.cohort.slides import SlideSettings, pack_slides, read_slide_manifest
from its2clr.cohort.slides.cluster import spread
from its2clr.cohort.slides.glass import Glass
from its2clr.cohort.slides.one_slide import pack_slide
from its2clr.cohort.slides.slide_image import open_slide, slide_mpp
from its2clr.cohort.slides.tiler import cut_tiles, plan_tiles, read_thumbnail
from its2clr.cohort.slides.tissue import TissueTest

SETTINGS = SlideSettings(mpp=0.5, tile_size=224)
ROUNDS = 3


def draw_slide(path: Path, side: int, seed: int) -> None:
    """A pyramid with tissue on about half of it."""
    rng = np.random.default_rng(seed)
    coarse = rng.random((side // 250 + 1, side // 250 + 1))
    tissue = (
        np.asarray(Image.fromarray((255 * coarse).astype(np.uint8)).resize((side, side), Image.Resampling.BICUBIC))
        > 127
    )
    texture = rng.integers(-40, 40, (side // 4, side // 4, 3)).astype(np.int16).repeat(4, 0).repeat(4, 1)
    pixels = np.full((side, side, 3), 243, np.uint8)
    pixels[tissue] = np.clip(np.array([190, 110, 170]) + texture[:side, :side][tissue], 0, 255)
    options = {"tile": (256, 256), "photometric": "rgb", "compression": "jpeg", "compressionargs": {"level": 85}}
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        for level in range(6):
            mpp = 0.5 * 2**level
            resolution = {"resolution": (1e4 / mpp, 1e4 / mpp), "resolutionunit": "CENTIMETER"}
            file.write(pixels, subfiletype=int(level > 0), metadata=None, **options, **resolution)
            pixels = np.asarray(Image.fromarray(pixels).reduce(2))


def tiles_read(path: Path) -> tuple[int, int, list[tuple[int, int]], int]:
    """What the command reads of a slide: level, size of the read, places; and how many of the tiles it keeps."""
    with open_slide(path) as slide:
        plan = plan_tiles(slide, slide_mpp(slide.mpp, None, None), SETTINGS.mpp, SETTINGS.tile_size)
        coords = plan.coords()
        thumbnail = read_thumbnail(slide, plan)
        glass = Glass(thumbnail, coords, plan.side, SETTINGS.min_saturation) if thumbnail else None
        verdicts = {tile.number: tile.verdict for tile in cut_tiles(slide, plan, TissueTest(), glass=glass)}
    kept = sum(verdict == "kept" for verdict in verdicts.values())
    return plan.level, plan.read_size, [(x, y) for x, y in coords[sorted(verdicts)].tolist()], kept


def bare_loop(path: Path, level: int, size: int, places: list[tuple[int, int]]) -> int:
    """Read, filter and encode, and nothing else."""
    encoded = []
    slide = openslide.OpenSlide(path)
    for place in places:
        tile = slide.read_region(place, level, (size, size)).convert("RGB")
        if size != SETTINGS.tile_size:
            tile = tile.resize((SETTINGS.tile_size, SETTINGS.tile_size), Image.Resampling.BILINEAR)
        if np.asarray(tile.convert("HSV"))[..., 1].mean() >= SETTINGS.min_saturation:
            buffer = io.BytesIO()
            tile.save(buffer, "JPEG", quality=SETTINGS.quality, subsampling=0)
            encoded.append(buffer.getvalue())
    slide.close()
    return len(encoded)


def seconds_of_bare_loop(files: list[Path], reads: list[tuple[int, int, list[tuple[int, int]], int]]) -> float:
    start = time.perf_counter()
    for path, (level, size, places, kept) in zip(files, reads, strict=True):
        assert bare_loop(path, level, size, places) == kept
    return time.perf_counter() - start


def seconds_of_two_bare_loops(files: list[Path], reads: list[tuple[int, int, list[tuple[int, int]], int]]) -> float:
    """The same work shared by two processes that know nothing of each other: what the machine itself allows."""
    work = [[(path, *read[:3]) for path, read in list(zip(files, reads, strict=True))[half::2]] for half in (0, 1)]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        list(pool.map(warm_up, range(2)))
        start = time.perf_counter()
        list(pool.map(several_bare_loops, work))
        return time.perf_counter() - start


def several_bare_loops(work: list[tuple[Path, int, int, list[tuple[int, int]]]]) -> None:
    for one in work:
        bare_loop(*one)


def warm_up(_: int) -> None:
    time.sleep(1)  # so that each process takes one of these, and both have started


def seconds_of_command(manifest: Path, workers: int, expected: int) -> float:
    out = manifest.parent / "out"
    slides = read_slide_manifest(manifest, labelled=False)
    start = time.perf_counter()
    summary = pack_slides(slides, out, SETTINGS, workers=workers)
    seconds = time.perf_counter() - start - seconds_to_start(workers)
    assert summary.counts.kept == expected, (summary.counts, expected)
    shutil.rmtree(out)
    return seconds


def seconds_to_start(workers: int) -> float:
    """From nothing to a worker that has imported what tiling needs, and back."""
    start = time.perf_counter()
    list(spread(imports, dict.fromkeys(map(str, range(workers))), Cluster(workers=workers)))
    return time.perf_counter() - start


def imports(_: None) -> str:
    return pack_slide.__name__


def measure(folder: Path, n_slides: int, side: int) -> dict[str, float]:
    files = [folder / f"{number}.tif" for number in range(n_slides)]
    for number, path in enumerate(files):
        draw_slide(path, side, number)
    manifest = folder / "slides.csv"
    manifest.write_text("bag_id,file\n" + "".join(f"{path.stem},{path.name}\n" for path in files))
    reads = [tiles_read(path) for path in files]
    tiles, kept = sum(len(read[2]) for read in reads), sum(read[3] for read in reads)
    rounds = [
        (
            seconds_of_bare_loop(files, reads),
            seconds_of_two_bare_loops(files, reads),
            *(seconds_of_command(manifest, workers, kept) for workers in (1, 2)),
            seconds_to_start(2),
        )
        for _ in range(ROUNDS)
    ]
    bare, bare_twice, single, double, starting = (statistics.median(times) for times in zip(*rounds, strict=True))
    return {
        "tiles_read": tiles,
        "tiles_kept": kept,
        "bare_loop_tiles_per_second": tiles / bare,
        "one_core_tiles_per_second": tiles / single,
        "two_cores_tiles_per_second": tiles / double,
        "one_core_to_bare_loop": bare / single,
        "two_cores_to_one": single / double,
        "two_bare_loops_to_one": bare / bare_twice,
        "seconds_to_start_two_workers": starting,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slides", type=int, default=12)
    parser.add_argument("--side", type=int, default=6000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), arguments.slides, arguments.side)
    for name, value in found.items():
        print(f"{name:<32}{value:10.2f}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

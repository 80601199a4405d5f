"""Tiles per second of `its2clr cohort slides` against bare loops that read, filter and encode the same tiles.

    python benchmarks/tiling.py [--slides 12] [--side 6000] [--out tiling.json]

Everything is measured in one run on the same slides, the bare loops and one worker in turns: ratios, not absolute
numbers, are the result. The slides are drawn: JPEG pyramids of textured tissue on glass. A bare loop is what one would
write by hand with OpenSlide and Pillow, for just the tiles that the command reads (not the glass it skips), or, as if
they were known beforehand, for just those that it keeps. Starting the worker processes is measured apart and taken off;
`..._with_start` is the ratio with it. The ratios of one core are of CPU seconds, so other work on the machine changes
them little. Two cores are measured by the clock; where the machine is busy they are not twice one:
`two_bare_loops_to_one` says what two independent processes gain there.
"""

import argparse
import io
import json
import resource
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


Reads = tuple[int, int, list[tuple[int, int]], int]
"""Level, size of a read, places; and how many of the tiles are kept."""


def tiles_read(path: Path) -> tuple[Reads, Reads]:
    """What the command reads of a slide, and what of it it keeps."""
    with open_slide(path) as slide:
        plan = plan_tiles(slide, slide_mpp(slide.mpp, None, None), SETTINGS.mpp, SETTINGS.tile_size)
        coords = plan.coords()
        thumbnail = read_thumbnail(slide, plan)
        glass = Glass(thumbnail, coords, plan.side, SETTINGS.min_saturation) if thumbnail else None
        verdicts = {tile.number: tile.verdict for tile in cut_tiles(slide, plan, TissueTest(), glass=glass)}
    read, kept = sorted(verdicts), sorted(number for number, verdict in verdicts.items() if verdict == "kept")
    every, only = ([(x, y) for x, y in coords[numbers].tolist()] for numbers in (read, kept))
    return (plan.level, plan.read_size, every, len(kept)), (plan.level, plan.read_size, only, len(kept))


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


def cpu_seconds() -> float:
    """Of this process and of those it started, once they have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def cpu_of_bare_loop(files: list[Path], reads: list[Reads]) -> float:
    start = cpu_seconds()
    for path, (level, size, places, kept) in zip(files, reads, strict=True):
        assert bare_loop(path, level, size, places) == kept
    return cpu_seconds() - start


def seconds_of_two_bare_loops(files: list[Path], reads: list[Reads]) -> float:
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


def seconds_of_command(manifest: Path, workers: int, expected: int) -> tuple[float, float]:
    """By the clock and of CPU, with the start of the workers."""
    out = manifest.parent / "out"
    slides = read_slide_manifest(manifest, labelled=False)
    start, cpu = time.perf_counter(), cpu_seconds()
    summary = pack_slides(slides, out, SETTINGS, workers=workers)
    found = time.perf_counter() - start, cpu_seconds() - cpu
    assert summary.counts.kept == expected, (summary.counts, expected)
    shutil.rmtree(out)
    return found


def seconds_to_start(workers: int) -> tuple[float, float]:
    """From nothing to a worker that has imported what tiling needs, and back; by the clock and of CPU."""
    start, cpu = time.perf_counter(), cpu_seconds()
    list(spread(imports, dict.fromkeys(map(str, range(workers))), Cluster(workers=workers)))
    return time.perf_counter() - start, cpu_seconds() - cpu


def imports(_: None) -> str:
    return pack_slide.__name__


def measure(folder: Path, n_slides: int, side: int) -> dict[str, float]:
    files = [folder / f"{number}.tif" for number in range(n_slides)]
    for number, path in enumerate(files):
        draw_slide(path, side, number)
    manifest = folder / "slides.csv"
    manifest.write_text("bag_id,file\n" + "".join(f"{path.stem},{path.name}\n" for path in files))
    reads, kept = map(list, zip(*map(tiles_read, files), strict=True))
    n_read, n_kept = sum(len(one[2]) for one in reads), sum(one[3] for one in reads)
    rounds = []
    for _ in range(ROUNDS):
        one, starting = seconds_of_command(manifest, 1, n_kept), seconds_to_start(1)
        two, both_starting = seconds_of_command(manifest, 2, n_kept), seconds_to_start(2)
        start = time.perf_counter()
        bare = cpu_of_bare_loop(files, reads)
        rounds.append(
            {
                "bare": bare,
                "bare_clock": time.perf_counter() - start,
                "bare_kept": cpu_of_bare_loop(files, kept),
                "bare_twice": seconds_of_two_bare_loops(files, reads),
                "one": one[1] - starting[1],
                "one_with_start": one[1],
                "one_clock": one[0] - starting[0],
                "two_clock": two[0] - both_starting[0],
                "starting": starting[1],
            }
        )
    took = {name: statistics.median(found[name] for found in rounds) for name in rounds[0]}
    return {
        "tiles_read": n_read,
        "tiles_kept": n_kept,
        "bare_loop_tiles_per_cpu_second": n_read / took["bare"],
        "one_core_tiles_per_cpu_second": n_read / took["one"],
        "one_core_to_bare_loop": took["bare"] / took["one"],
        "one_core_to_bare_loop_over_kept": took["bare_kept"] / took["one"],
        "one_core_to_bare_loop_over_kept_with_start": took["bare_kept"] / took["one_with_start"],
        "two_cores_to_one": took["one_clock"] / took["two_clock"],
        "two_bare_loops_to_one": took["bare_clock"] / took["bare_twice"],
        "cpu_seconds_to_start_a_worker": took["starting"],
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

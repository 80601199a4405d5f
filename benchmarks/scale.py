"""Seconds and memory of every command over the number of bags, and of tiling over the number of slides.

    python benchmarks/scale.py [--bags 1000 3000 10000] [--slides 50 150 500] [--folder DIR]

For each number of bags it writes a cohort of features (500 instances of 512 features in half precision, about 0.5 MB a
bag), runs the commands on it one after the other, and notes of each the seconds on the clock, the CPU seconds (user and
system) and the most memory that the command and its child processes held, sampled 20 times a second. Trainings are
short (`FIT`): their costs grow with epochs, which are noted one by one.

The slides are JPEG pyramids of 20,000 px. Eight are drawn; the others are hard links to them, which takes no space and
is the same work. The largest number of slides is also tiled with a kill (SIGKILL of all its processes) in the middle
and the same command again, and the two cohorts are compared.

Everything is written below --folder and removed again. Results are joined with those that --out has already, so that
numbers of bags or slides can be measured one by one.
"""

import argparse
import contextlib
import json
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil
import tifffile
from PIL import Image

RESULTS = Path(__file__).parent / "results" / "scale.json"
PICTURE = Path(__file__).parents[1] / "docs" / "scale.png"
INSTANCES, FEATURES = 500, 512
SIDE = 20_000
DRAWN = 8
FIT = {
    "aggregator.epochs": 1,
    "refine.reader.epochs": 1,
    "refine.epochs": 1,
    "refine.steps_per_epoch": 500,
    "refine.warmup_epochs": 0,
    "refine.aggregator_seeds": 1,
    "evaluation.retrainings": 1,
}
"""Settings of the short training; all else is as in the recipe `features`."""
MEMORY_BOUND = ["--set", "engine.tiles=disk"]
"""Features that are worked on lie in files, not in memory."""
SAMPLE_SECONDS = 0.05


def write_features(folder: Path, bags: int) -> Path:
    """Feature files as TRIDENT writes them, in half precision, and the table of their bags; a quarter of the positive
    bags' instances are shifted in some features."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    side = int(np.ceil(np.sqrt(INSTANCES)))
    coords = 256 * np.stack(np.divmod(np.arange(INSTANCES), side), axis=1)
    about = {"patch_size": 256, "patch_size_level0": 256, "level0_magnification": 20, "target_magnification": 20}
    for number in range(bags):
        values = rng.standard_normal((INSTANCES, FEATURES), dtype=np.float32)
        if number % 2:
            values[: INSTANCES // 4, :16] += 1
        with h5py.File(folder / f"bag-{number:05d}.h5", "w") as file:
            file["features"] = values.astype(np.float16)
            file["coords"] = coords
            file["coords"].attrs.update(about)
    table = folder.with_suffix(".csv")
    table.write_text("bag_id,label\n" + "".join(f"bag-{number:05d},{number % 2}\n" for number in range(bags)))
    return table


class Measured:
    """What a command and its children use, from the moment it is started.

    Args:
        words: The command.
        log: Where its output goes.
    """

    def __init__(self, words: list[str], log: Path) -> None:
        self._started, self._before = time.perf_counter(), _child_seconds()
        with log.open("ab") as output:
            self.process = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)
        self.peak = self.own = 0
        self._log = log
        self._sampler = threading.Thread(target=self._sample)
        self._sampler.start()

    def _sample(self) -> None:
        while self.process.poll() is None:
            total = own = 0
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(self.process.pid)
                for one in (root, *root.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        used = one.memory_info()
                        total, own = total + used.rss, own + used.rss - used.shared
            self.peak, self.own = max(self.peak, total), max(self.own, own)
            time.sleep(SAMPLE_SECONDS)

    def end(self, expected: int = 0) -> dict[str, float]:
        """Wait for its end: seconds, CPU seconds, peak of resident memory, and of that without mapped files, in MB."""
        code = self.process.wait()
        self._sampler.join()
        if code != expected:
            raise SystemExit(f"{self.process.args} ended with {code}:\n{self._log.read_text()[-3000:]}")
        return {
            "seconds": round(time.perf_counter() - self._started, 2),
            "cpu_seconds": round(_child_seconds() - self._before, 2),
            "peak_mb": round(self.peak / 1e6),
            "own_mb": round(self.own / 1e6),
        }


def _child_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "its2clr", *map(str, words)]


def measure_bags(folder: Path, bags: int, said: Callable[[str, dict[str, float]], None]) -> dict[str, Any]:
    """Every command on a cohort of this many bags."""
    found: dict[str, Any] = {}
    log = folder / "log.txt"
    cohort, run = folder / "cohort", folder / "run"

    def measure(name: str, *words: str | Path) -> None:
        found[name] = Measured(command(*words), log).end()
        said(name, found[name])

    table = write_features(folder / "features", bags)
    measure("cohort", "cohort", "features", table, cohort, "--features", folder / "features")
    shutil.rmtree(folder / "features")
    measure("doctor", "doctor", cohort)
    settings = [word for name, value in FIT.items() for word in ("--set", f"{name}={value}")]
    measure("fit", "fit", cohort, "--out", run, *settings, *MEMORY_BOUND)
    found["epochs"] = seconds_of_epochs(run)
    state = json.loads((run / "state.json").read_text())
    _forget(state, "evaluate")
    (run / "state.json").write_text(json.dumps(state))
    measure("evaluate", "evaluate", run, *MEMORY_BOUND)
    shutil.rmtree(run / "features")
    shutil.rmtree(cohort / "decoded", ignore_errors=True)
    measure("predict", "predict", run, cohort, "--out", folder / "predictions")
    measure("report", "report", run)
    measure("map", "map", run)
    measure("geojson", "geojson", folder / "predictions")
    found["viewer"] = measure_viewer(run, log)
    said("viewer", found["viewer"])
    return found


def _forget(state: dict[str, Any], stage: str) -> None:
    """Take a stage out of the finished ones, wherever the run notes them."""
    for value in [state, *state.values()]:
        if isinstance(value, dict):
            value.pop(stage, None)


def seconds_of_epochs(run: Path) -> dict[str, float]:
    """Mean seconds on the clock of an epoch of the refinement, and of a round of pseudo labels."""
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, list[float]] = {}
    for entry in entries:
        if entry.get("stage") in {"refine", "round"}:
            found.setdefault(entry["stage"], []).append(entry["seconds"])
    return {name: round(float(np.mean(values)), 2) for name, values in found.items()}


def measure_viewer(run: Path, log: Path) -> dict[str, float]:
    """The viewer from its start to its first page, then that page and others again."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    known = {"Authorization": "Bearer scale"}
    started = time.perf_counter()
    measured = Measured(command("view", run, "--port", str(port), "--no-open", "--token", "scale"), log)

    def ask(path: str) -> float:
        before = time.perf_counter()
        with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/{path}", headers=known)) as answer:
            answer.read()
        return round(time.perf_counter() - before, 3)

    while True:
        try:
            ask("")
            break
        except urllib.error.URLError as error:
            if isinstance(error, urllib.error.HTTPError):
                raise
            if measured.process.poll() is not None:
                measured.end()
            time.sleep(0.02)
    found = {"start_seconds": round(time.perf_counter() - started, 2)}
    found["first_page_seconds"] = round(sum(ask(path) for path in ("", "api/run", "api/bags")), 3)
    found["sorted_page_seconds"] = ask("api/bags?sort=error&descending=true&page=1")
    found["search_seconds"] = ask("api/bags?query=9")
    found["first_bag_seconds"] = round(sum(ask(f"api/bags/1{path}") for path in ("", "/scores", "/thumbnail")), 3)
    found["next_bag_seconds"] = round(sum(ask(f"api/bags/2{path}") for path in ("", "/scores", "/thumbnail")), 3)
    measured.process.send_signal(signal.SIGINT)
    used = measured.end()
    return {**found, **{name: used[name] for name in ("cpu_seconds", "peak_mb", "own_mb")}}


def draw_slide(path: Path, side: int, seed: int) -> None:
    """A JPEG pyramid with textured tissue on about a third of it, drawn in bands."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray((255 * rng.random((9, 9))).astype(np.uint8))
    tissue = np.asarray(coarse.resize((side // 20, side // 20), Image.Resampling.BICUBIC)) > 150
    tissue = tissue.repeat(20, 0).repeat(20, 1)
    texture = rng.integers(-40, 40, (side // 8, side // 8, 3)).astype(np.int16).repeat(8, 0).repeat(8, 1)
    pixels = np.full((side, side, 3), 243, np.uint8)
    for top in range(0, side, 1000):
        band = slice(top, top + 1000)
        inside = tissue[band]
        pixels[band][inside] = np.clip(np.array([190, 110, 170]) + texture[band][inside], 0, 255)
    options = {"tile": (256, 256), "photometric": "rgb", "compression": "jpeg", "compressionargs": {"level": 80}}
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        for level in range(6):
            mpp = 0.5 * 2**level
            resolution = {"resolution": (1e4 / mpp, 1e4 / mpp), "resolutionunit": "CENTIMETER"}
            file.write(pixels, subfiletype=int(level > 0), metadata=None, **options, **resolution)
            pixels = np.asarray(Image.fromarray(pixels).reduce(2))


def measure_slides(
    folder: Path, counts: list[int], side: int, said: Callable[[str, dict[str, float]], None]
) -> dict[str, Any]:
    """Tiling of these numbers of slides, and of the largest once more with a kill in the middle."""
    drawn = [folder / f"drawn-{number}.tif" for number in range(min(DRAWN, max(counts)))]
    for number, path in enumerate(drawn):
        draw_slide(path, side, number)
    slides = folder / "slides"
    slides.mkdir()
    log, found = folder / "log.txt", {}
    for count in sorted(counts):
        table = folder / "slides.csv"
        names = [f"slide-{number:04d}" for number in range(count)]
        for number, name in enumerate(names):
            if not (slides / f"{name}.tif").exists():
                os.link(drawn[number % len(drawn)], slides / f"{name}.tif")
        rows = (f"{name},slides/{name}.tif,{number % 2}\n" for number, name in enumerate(names))
        table.write_text("bag_id,file,label\n" + "".join(rows))
        out = folder / "tiled"
        words = command("cohort", "slides", table, out, "--magnification", "5")
        one = Measured(words, log).end()
        one["tiles"] = sum(int(line.split(",")[-1]) for line in _bags(out)[1:])
        found[str(count)] = one
        said(f"{count} slides", one)
        if count == max(counts):
            found[str(count)]["after_kill"] = after_kill(words, out, log)
            said(f"{count} slides, killed", found[str(count)]["after_kill"])
        shutil.rmtree(out)
    return found


def after_kill(words: list[str], out: Path, log: Path) -> dict[str, Any]:
    """Tile again into a new folder, kill it when half is there, go on; is the cohort the same?"""
    whole = cohort_content(out)
    shutil.rmtree(out)
    first = Measured(words, log)
    half = len(whole["bags"]) // 2
    while len(list((out / "tiles").glob("*.h5"))) < half:
        time.sleep(0.1)
        if first.process.poll() is not None:
            raise SystemExit(f"tiling ended before it could be killed:\n{log.read_text()[-3000:]}")
    for one in [first.process, *psutil.Process(first.process.pid).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    first.end(-signal.SIGKILL)
    there = len(list((out / "tiles").glob("*.h5")))
    again = Measured(words, log).end()
    left = [path.name for path in out.rglob("*.part")]
    return {"slides_at_kill": there, **again, "same_cohort": cohort_content(out) == whole and not left}


def _bags(cohort: Path) -> list[str]:
    return (cohort / "bags.csv").read_text().splitlines()


def cohort_content(cohort: Path) -> dict[str, Any]:
    """Bags, splits, counts and the hashes of all tiles and labels."""
    hashes = json.loads((cohort / "content.json").read_text())["bags"]
    return {"bags": _bags(cohort)[1:], "content": {bag: entry[3:] for bag, entry in sorted(hashes.items())}}


@contextlib.contextmanager
def emptied(folder: Path | None) -> Iterator[Path]:
    """A folder for one measurement, removed afterwards."""
    made = Path(tempfile.mkdtemp(prefix="scale-", dir=folder))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def draw(found: dict[str, Any], path: Path) -> None:
    """CPU seconds and peak memory of every command over bags, and of tiling over slides."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    bags = sorted(found.get("bags", {}), key=int)
    names = [name for name in found["bags"][bags[0]] if name != "epochs"] if bags else []
    panels = [("cpu_seconds", "CPU seconds"), ("peak_mb", "peak memory of all processes, MB")]
    for row, (key, words) in zip(axes.T, panels, strict=True):
        for name in names:
            row[0].plot([int(n) for n in bags], [found["bags"][n][name][key] for n in bags], "o-", label=name)
        row[0].set(xlabel="bags", ylabel=words)
        slides = sorted(found.get("slides", {}), key=int)
        row[1].plot([int(n) for n in slides], [found["slides"][n][key] for n in slides], "o-", color="black")
        row[1].set(xlabel="slides tiled", ylabel=words, ylim=(0, None), xlim=(0, None))
    if names:
        axes[0, 0].set(xscale="log", yscale="log")
        axes[0, 1].axhline(4096 * 1.048576, color="grey", linestyle=":", label="4 GiB")
        axes[0, 1].set(xlim=(0, None), ylim=(0, None))
        figure.legend(*axes[0, 1].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=110)


def tables(found: dict[str, Any]) -> list[str]:
    """What was measured, as two tables of Markdown; docs/scale.md holds them."""
    bags = sorted(found["bags"], key=int)
    names = [name for name in found["bags"][bags[0]] if name != "epochs"]
    spans = list(pairwise(bags))
    head = [*(f"CPU s, {n}" for n in bags), *(f"CPU ms per bag, {a} to {b}" for a, b in spans)]
    lines = _head("", *head, *(f"peak MB, {n}" for n in bags))
    for name in names:
        used = [found["bags"][n][name] for n in bags]
        steps = [b["cpu_seconds"] - a["cpu_seconds"] for a, b in pairwise(used)]
        per_bag = [f"{1000 * step / (int(b) - int(a)):.1f}" for step, (a, b) in zip(steps, spans, strict=True)]
        seconds = [f"{one['cpu_seconds']:.0f}" for one in used]
        lines.append(_row(name, *seconds, *per_bag, *(one["peak_mb"] for one in used)))
    slides = sorted(found["slides"], key=int)
    lines += ["", *_head("slides", "tiles", "CPU s", "CPU s per slide", "peak MB")]
    for count in slides:
        one = found["slides"][count]
        seconds = one["cpu_seconds"]
        lines.append(_row(count, one["tiles"], f"{seconds:.0f}", f"{seconds / int(count):.2f}", one["peak_mb"]))
    return lines


def _head(*cells: str) -> list[str]:
    return [_row(*cells), "|---" * len(cells) + "|"]


def _row(*cells: str | float) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bags", type=int, nargs="*", default=[1000, 3000, 10000])
    parser.add_argument("--slides", type=int, nargs="*", default=[50, 150, 500])
    parser.add_argument("--side", type=int, default=SIDE, help="pixels of a slide's side")
    parser.add_argument("--folder", type=Path, help="where to work; needs 5 MB of room for each bag")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    given = parser.parse_args(arguments)
    found = json.loads(given.out.read_text()) if given.out.is_file() else {}
    found |= {
        "bag": {"instances": INSTANCES, "features": FEATURES, "stored": "float16"},
        "fit": FIT,
        "hardware": {"cores": len(os.sched_getaffinity(0)), "machine": platform.machine()},
    }

    def said(name: str, used: dict[str, float]) -> None:
        print(f"{name:<24}", "  ".join(f"{key} {value}" for key, value in used.items()), flush=True)

    def keep() -> None:
        given.out.write_text(json.dumps(found, indent=2) + "\n")
        draw(found, given.picture)

    for bags in given.bags:
        print(f"{bags} bags", flush=True)
        with emptied(given.folder) as folder:
            found.setdefault("bags", {})[str(bags)] = measure_bags(folder, bags, said)
        keep()
    if given.slides:
        with emptied(given.folder) as folder:
            found.setdefault("slides", {}).update(measure_slides(folder, given.slides, given.side, said))
        keep()
    if {"bags", "slides"} <= found.keys():
        print("\n".join(tables(found)))


if __name__ == "__main__":
    main()

"""Damaged inputs: many through the readers, and whole cohorts, runs and models with damage through the commands.

Every input is drawn from a seed. A reader must read it, or raise the one error that is meant for it. A command must end
with exit code 0, or with one line and exit code 2. Readers get bytes changed at random, documents with odd values in
them (Hypothesis), and bytes that reach new lines of ours (Atheris).
"""

import json
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.campaign import guided, structured
from tests.campaign.bombs import bombs
from tests.campaign.inputs import mutations
from tests.campaign.kinds import Kind, kinds
from tests.campaign.machine import HANG_SECONDS, MOST_MEMORY, draw_of, fork, its2clr, outside
from tests.campaign.places import Places
from tests.campaign.tally import Clock, Part
from tests.end_to_end.commands import ROOT, environment

AT_ONCE = 100
"""Inputs of a kind that one process reads."""
GUIDED_SECONDS = 20
"""That Atheris has for a kind at a time."""
SHARE_OF_READERS = 0.5
"""Of the time; the rest goes to commands."""


def inputs(places: Places, part: Part, clock: Clock, seed: int, *, short: bool = False) -> None:
    """Damaged inputs until the time is up: bombs first, then readers and commands in turn."""
    part.notes["bombs"] = bombs(places, part, short=short)
    known = kinds(places.run, places.cohort)
    if short:
        for name, kind in known.items():
            read_many(name, kind, places, part, seed, count=8)
        for name in ("cohort: table", "run: config", "annotations, GeoJSON"):
            read_odd(name, known[name], places, part, seed, count=12)
        for command in (images, features, models):
            command(places, part, draw_of(seed, command.__name__))
        return
    if not guided.installed():
        part.notes["atheris"] = "not installed: no guided inputs"
    number, reading = 0, 0.0
    while True:
        begun = time.monotonic()
        for name, kind in known.items():
            read_many(name, kind, places, part, seed + 1000 * number)
            if kind.file.rpartition(".")[2] in structured.FORMS:
                read_odd(name, kind, places, part, seed + 1000 * number)
        if guided.installed():
            read_guided(guided.KINDS[number % len(guided.KINDS)], places, part, seed + number)
        reading += time.monotonic() - begun
        while reading > 0 and (clock.passed() - reading) < reading * (1 / SHARE_OF_READERS - 1):
            for place, command in enumerate(COMMANDS):
                command(places, part, draw_of(seed, "commands", number, place))
            if clock.over():
                break
            number += 1
        number += 1
        if clock.over():
            return


def read_many(name: str, kind: Kind, places: Places, part: Part, seed: int, count: int = AT_ONCE) -> None:
    """Read files of one kind with bytes changed at random."""

    def feed(whole: bytes, read: Callable[[bytes], None]) -> None:
        for number, content in enumerate(mutations(whole, count, seed)):
            print(f"input {number} of seed {seed}", flush=True)
            read(content)

    _read_all(f"read {name}", kind, feed, places, part, seed, count)


def read_odd(name: str, kind: Kind, places: Places, part: Part, seed: int, count: int = AT_ONCE) -> None:
    """Read files of one kind with odd values in them."""

    def feed(whole: bytes, read: Callable[[bytes], None]) -> None:
        structured.feed(kind.file, whole, count, seed, read)

    _read_all(f"read odd {name}", kind, feed, places, part, seed, 20 * count)  # shrinking reads many more


def _read_all(
    what: str,
    kind: Kind,
    feed: Callable[[bytes, Callable[[bytes], None]], None],
    places: Places,
    part: Part,
    seed: int,
    most: int,
) -> None:
    """Read all that is fed, in a process of its own."""
    folder = places.new("read")
    counted = folder / "counted.json"

    def work() -> int:
        found = {"read": 0, "refused": 0, "seconds": 0.0}
        path = folder / "files" / kind.file
        path.parent.mkdir()
        kind.make(path)
        whole = path.read_bytes()
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a library that never comes back hears nothing else

        def read(content: bytes) -> None:
            path.write_bytes(content)
            begun = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, HANG_SECONDS)
            try:
                kind.read(path)
                found["read"] += 1
            except kind.error:
                found["refused"] += 1
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                found["seconds"] = max(found["seconds"], time.process_time() - begun)

        feed(whole, read)
        counted.write_text(json.dumps(found))
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return 0 if used <= MOST_MEMORY else 3

    ended = fork(work, folder, limit=most * HANG_SECONDS)
    found = json.loads(counted.read_text()) if counted.is_file() else {"read": 0, "refused": 1, "seconds": 0.0}
    part.tried(what, found["read"] + found["refused"])
    complaint = ended.complaint()
    if ended.code == -signal.SIGPROF:
        complaint = f"hung: more than {HANG_SECONDS} s for one input"
    part.peak, part.slowest = max(part.peak, ended.peak), max(part.slowest, found["seconds"])
    if complaint is not None:
        part.failed(f"{what} (seed {seed})", complaint)


def read_guided(name: str, places: Places, part: Part, seed: int) -> None:
    """Let Atheris look for bytes that a reader trips over; it counts, and sees hangs and memory, by itself."""
    words = guided.words(name, GUIDED_SECONDS, seed)
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    runs = guided.RUNS.search(done.stderr)
    part.tried(f"guided {name}", int(runs[1]) if runs else 1)
    if done.returncode:
        how = {70: "hung", 71: "took more than 4 GB"}.get(done.returncode, "traceback")
        part.failed(f"guided {name} (seed {seed})", f"{how}: {(done.stdout + done.stderr)[-1500:]}")


def _damaged(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(next(mutations(content, 1, draw.randrange(2**32))))


def _run(what: str, words: list[object], folder: Path, part: Part, count: int = 1) -> None:
    part.tried(what, count)
    ended = its2clr(words, folder)
    shown = " ".join(map(str, words))
    part.ended(f"{what}: {shown}", ended)
    if ended.code == 2 and not ended.output.strip():
        part.failed(what, "other: refused without a word")
    if strange := outside(folder):
        part.failed(what, f"outside: {strange[:4]}")


def images(places: Places, part: Part, draw: random.Random) -> None:
    """Every second image of a cohort is damaged."""
    folder = places.new("damaged")
    shutil.copytree(places.images.parent, folder / "in")
    damaged = [path for path in sorted((folder / "in").rglob("*.*g")) if draw.random() < 0.5]
    for path in damaged:
        _damaged(path, draw)
    words = ["cohort", "images", folder / "in" / "bags.csv", folder / "out", "--tile-size", "32"]
    _run("cohort images", words, folder, part, len(damaged))


def features(places: Places, part: Part, draw: random.Random) -> None:
    """Half the feature files of a cohort are damaged."""
    folder = places.new("damaged")
    shutil.copytree(places.features.parent, folder / "in")
    damaged = [path for path in sorted((folder / "in").glob("*.h5")) if draw.random() < 0.5]
    for path in damaged:
        _damaged(path, draw)
    words = ["cohort", "features", folder / "in" / "bags.csv", folder / "out", "--features", folder / "in"]
    _run("cohort features", words, folder, part, len(damaged))


def slides(places: Places, part: Part, draw: random.Random) -> None:
    """Slides of a cohort are damaged, or their annotations."""
    folder = places.new("damaged")
    shutil.copytree(places.slides.parent, folder / "in")
    known = kinds()
    rows, count = ["bag_id,file,label,split,annotation"], 0
    for number, line in enumerate((folder / "in" / "slides.csv").read_text().splitlines()[1:]):
        kind = known[("annotations, GeoJSON", "annotations, XML", "annotations, mask")[number % 3]]
        file = folder / "in" / f"{number}-{kind.file}"
        kind.make(file)
        for path in (file, folder / "in" / f"{number}.tif"):
            if draw.random() < 0.5:
                _damaged(path, draw)
                count += 1
        rows.append(f"{line},{file.name}")
    (folder / "in" / "slides.csv").write_text("\n".join(rows) + "\n")
    words = ["cohort", "slides", folder / "in" / "slides.csv", folder / "out", "--mpp", "0.5", "--tile-size", "32"]
    _run("cohort slides", [*words, "--workers", "1"], folder, part, count)


def tables(places: Places, part: Part, draw: random.Random) -> None:
    """A damaged manifest."""
    folder = places.new("damaged")
    for source in (places.images, places.features, places.slides):
        target = source.parent / f".damaged-{source.name}"
        target.write_bytes(source.read_bytes())
        _damaged(target, draw)
        extra: list[object] = ["--features", source.parent] if source == places.features else []
        extra = ["--mpp", "0.5", "--tile-size", "32", "--workers", "1"] if source == places.slides else extra
        _run("manifest", ["cohort", source.parent.name, target, folder / "out", *extra], folder, part)
        target.unlink()
        shutil.rmtree(folder / "out", ignore_errors=True)


def cohorts(places: Places, part: Part, draw: random.Random) -> None:
    """One file of a cohort is damaged, and something done with it."""
    folder = places.new("damaged")
    shutil.copytree(places.cohort, folder / "cohort")
    choices = [path for path in sorted((folder / "cohort").rglob("*")) if path.is_file()]
    tables = [path for path in choices if path.suffix in {".csv", ".json"}]
    _damaged(draw.choice(tables if draw.random() < 0.5 else choices), draw)
    cohort = folder / "cohort"
    done: list[list[object]] = [
        ["doctor", cohort],
        ["cohort", "resample", cohort, folder / "out", "--keep-positives", "0.5"],
        ["predict", places.run, cohort, "--out", folder / "out"],
    ]
    _run("cohort with damage", draw.choice(done), folder, part)


def runs(places: Places, part: Part, draw: random.Random) -> None:
    """One file of a run is damaged, and something done with it."""
    folder = places.new("damaged")
    run = folder / "run"
    shutil.copytree(places.run, run)
    choices = [path for path in sorted(run.rglob("*")) if path.is_file() and path.name != "report.html"]
    top = [path for path in choices if path.parent == run or path.parent.name == "checkpoints"]
    _damaged(draw.choice(top if draw.random() < 0.7 else choices), draw)
    out = folder / "out"
    done: list[list[object]] = [
        ["evaluate", run],
        ["report", run],
        ["map", run, "--out", out, "--limit", "1"],
        ["geojson", run, "--out", out, "--limit", "2"],
        ["export", run, "--out", out],
        ["extract", "--out", run, "--encoder", "start"],
        ["predict", run, places.slides.parent / "0.tif", "--out", out, "--workers", "1"],
        ["cohort", "features", out, "--from-run", run],
    ]
    _run("run with damage", draw.choice(done), folder, part)


def models(places: Places, part: Part, draw: random.Random) -> None:
    """A damaged model file."""
    folder = places.new("damaged")
    shutil.copy(places.run / "model.its2clr", folder / "in.its2clr")
    _damaged(folder / "in.its2clr", draw)
    _run("model file", ["predict", folder / "in.its2clr", places.cohort, "--out", folder / "out"], folder, part)


def settings_and_weights(places: Places, part: Part, draw: random.Random) -> None:
    """Damaged recipes and weights."""
    folder, known = places.new("damaged"), kinds(places.run)
    for name in ("recipe", "weights, torch", "run: encoder"):
        kind = known[name]
        path = folder / kind.file
        kind.make(path)
        _damaged(path, draw)
        words: list[object] = ["recipes", path] if name == "recipe" else ["weights", path]
        _run(name, words, folder, part)


COMMANDS: tuple[Callable[[Places, Part, random.Random], None], ...] = (
    images, features, slides, tables, cohorts, runs, runs, runs, models, settings_and_weights,
)  # fmt: skip

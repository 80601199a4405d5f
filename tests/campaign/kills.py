"""Random `kill -9` of every command that writes: the same command goes on, to the results of one never killed.

A command is killed after a random time, or at a random file operation: just before or just after a rename, an fsync, a
removal. Then it is started again, and perhaps killed again, until it is let through.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.campaign.content import content, differences, half_written
from tests.campaign.machine import HANG_SECONDS, Ended, draw_of, its2clr, outside
from tests.campaign.places import Places, settings
from tests.campaign.tally import Clock, Part

MOST_KILLS = 4
"""Of one command, before it is let through."""


@dataclass(frozen=True)
class Case:
    """A command that writes.

    Attributes:
        name: Of the command.
        words: The command that writes to a folder.
        prepare: Puts into that folder what must be there before; nothing if None.
    """

    name: str
    words: Callable[[Path], list[object]]
    prepare: Callable[[Path], None] | None = None


@dataclass(frozen=True)
class Undisturbed:
    """A command that was not killed.

    Attributes:
        content: What its folder holds.
        seconds: How long it took.
        operations: Its file operations.
    """

    content: dict[str, str]
    seconds: float
    operations: int


def cases(places: Places) -> list[Case]:
    """Every command that writes."""
    cohort, run = places.cohort, places.run

    def copy_of_run(out: Path) -> None:
        shutil.copytree(run, out)

    def without_features(out: Path) -> None:
        copy_of_run(out)
        shutil.rmtree(out / "features", ignore_errors=True)

    def not_evaluated(out: Path) -> None:
        copy_of_run(out)
        state = json.loads((out / "state.json").read_text())
        del state["stages"]["evaluate"]
        (out / "state.json").write_text(json.dumps(state))
        for name in ("results.json", "predictions.parquet", "bag_predictions.csv", "model.its2clr", "report.html"):
            (out / name).unlink(missing_ok=True)

    def predictions(out: Path) -> None:
        predict = its2clr(["predict", run, cohort, "--out", out], out.parent)
        assert predict.code == 0, predict.output

    def corrections(out: Path) -> None:
        folder = out.parent / "corrections"
        folder.mkdir(exist_ok=True)
        bag = (cohort / "bags.csv").read_text().splitlines()[1].split(",")[0]
        square = {"type": "Polygon", "coordinates": [[[0, 0], [64, 0], [64, 64], [0, 64], [0, 0]]]}
        marked = {"type": "Feature", "geometry": square, "properties": {"classification": "Confirmed negative"}}
        (folder / f"{bag}.geojson").write_text(json.dumps({"type": "FeatureCollection", "features": [marked]}))

    return [
        Case("cohort synthetic", lambda out: ["cohort", "synthetic", out, "--size", "tiny", "--workers", "1"]),
        Case("cohort images", lambda out: ["cohort", "images", places.images, out, "--tile-size", "32"]),
        Case(
            "cohort slides",
            lambda out: ["cohort", "slides", places.slides, out, "--mpp", "0.5", "--tile-size", "32", "--workers", "1"],
        ),
        Case(
            "cohort features",
            lambda out: ["cohort", "features", places.features, out, "--features", places.features.parent],
        ),
        Case("cohort resample", lambda out: ["cohort", "resample", cohort, out, "--keep-positives", "0.5"]),
        Case("fit", lambda out: ["fit", cohort, "--out", out, *settings()]),
        Case(
            "fit of features",
            lambda out: [
                "fit", places.feature_cohort, "--out", out, "--set", "refine.epochs=2", "--set",
                "refine.warmup_epochs=1", "--set",
                "aggregator.epochs=2", "--set", "evaluation={retrainings: 1, bootstrap: 20}",
            ],
        ),
        Case(
            "end-to-end",
            lambda out: [
                "end-to-end", cohort, "--out", out, *settings(), "--set", "end_to_end.start=scratch", "--set",
                "end_to_end.epochs=2",
            ],
        ),
        Case("extract", lambda out: ["extract", "--out", out, "--encoder", "start"], without_features),
        Case("aggregate", lambda out: ["aggregate", "--out", out, "--aggregator", "max"], copy_of_run),
        Case("evaluate", lambda out: ["evaluate", out], not_evaluated),
        Case("report", lambda out: ["report", out], not_evaluated),
        Case("predict", lambda out: ["predict", run / "model.its2clr", places.slides.parent, "--out", out]),
        Case("predict a cohort", lambda out: ["predict", run, cohort, "--out", out]),
        Case("score", lambda out: ["score", out, cohort / "bags.csv"], predictions),
        Case("map", lambda out: ["map", run, "--out", out, "--limit", "2"]),
        Case("geojson", lambda out: ["geojson", run, "--out", out, "--limit", "6"]),
        Case("export", lambda out: ["export", run, "--out", out, "--formats", "timm,features"]),
        Case(
            "correct",
            lambda out: ["correct", run, out.parent / "corrections", "--out", out],
            corrections,
        ),
        Case(
            "tune",
            lambda out: ["tune", cohort, "--out", out, "--trials", "2", "--workers", "1", *settings()],
        ),
    ]  # fmt: skip


SHORT = ("cohort images", "predict a cohort", "geojson")
"""Commands of the short campaign."""


def kills(places: Places, part: Part, clock: Clock, seed: int, *, short: bool = False) -> None:
    """Kill commands until the time is up; each command has its turn."""
    chosen = [case for case in cases(places) if not short or case.name in SHORT]
    known: dict[str, Undisturbed] = {}
    inputs = content(places.cohort)
    finished = content(places.run)
    number = 0
    part.notes["commands_let_through"] = 0
    while number < len(chosen) or not clock.over():
        case = chosen[number % len(chosen)]
        folder = places.new("killed")
        if case.name not in known:
            known[case.name] = undisturbed(case, places, part)
        _one_chain(case, known[case.name], folder, part, seed, number)
        for what, before, now in (("cohort", inputs, places.cohort), ("run", finished, places.run)):
            if changed := differences(before, content(now)):
                part.failed(case.name, f"outside: changed the {what} it read: {changed}")
        number += 1


def undisturbed(case: Case, places: Places, part: Part) -> Undisturbed:
    """Run a command in the folder `whole` of the campaign, and let it be."""
    folder = places.new("whole")
    out = folder / "out"
    if case.prepare:
        case.prepare(out)
    ended = its2clr(case.words(out), folder, limit=10 * HANG_SECONDS)
    if ended.code:
        part.failed(case.name, f"was not killed, but ended with {ended.code}: {ended.output[-1000:]}")
    return Undisturbed(content(out), ended.seconds, ended.operations)


def _one_chain(case: Case, known: Undisturbed, folder: Path, part: Part, seed: int, number: int) -> None:
    draw = draw_of(seed, "kills", number, case.name)
    out = folder / "out"
    if case.prepare:
        case.prepare(out)
    limit = HANG_SECONDS + 3 * known.seconds
    said: list[str] = []
    operations, seconds = 2 * known.operations, known.seconds  # what is left, if a kill loses nothing
    for _ in range(draw.randint(1, MOST_KILLS)):
        if operations and draw.random() < 0.5:
            place = draw.randrange(operations)
            operations -= place
            ended = its2clr(case.words(out), folder, limit=limit, kill_at=place)
            said.append(f"operation {place}")
        else:
            moment = draw.uniform(0, seconds)
            seconds -= moment / 2
            ended = its2clr(case.words(out), folder, limit=limit, kill_after=moment)
            said.append(f"{moment:.2f} s")
        if ended.code != -9 or ended.hung:
            break
        part.tried(case.name)
    else:
        ended = its2clr(case.words(out), folder, limit=limit)
    what = f"{case.name} (seed {seed}, {number}), killed at {', '.join(said)}"
    if not part.ended(what, ended) or not _finished(what, ended, part):
        return
    part.notes["commands_let_through"] += 1
    if changed := differences(known.content, content(out)):
        part.failed(what, f"result changed: {changed[:8]}")
    if left := half_written(out):
        part.failed(what, f"outside: half written files stay: {left[:4]}")
    if strange := [*outside(folder), *_beside(folder)]:
        part.failed(what, f"outside: {strange[:4]}")


def _finished(what: str, ended: Ended, part: Part) -> bool:
    if ended.code:
        part.failed(what, f"refused to go on, exit code {ended.code}: {ended.output[-1000:]}")
    return ended.code == 0


def _beside(folder: Path) -> list[str]:
    known = {"out", "here", "home", "tmp", "said.txt", "corrections"}
    return [str(path) for path in folder.iterdir() if path.name not in known]

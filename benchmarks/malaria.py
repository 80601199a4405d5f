"""ItS2CLR on real bags: smears of single cells, patients never shared between splits (docs/results-real.md).

    python benchmarks/malaria.py CELLS MAKE_BAGS OUT [--rates 0.1] [--samplings 3] [--trainings 3] [--rows ...]
        [--row "NAME: KEY=VALUE; KEY=VALUE" ...] [--workers 12] [--split val] [--set KEY=VALUE ...] [--starts FOLDER]
        [--json FILE] [--no-train]

CELLS is where cells.zip of the malaria smears was unpacked, MAKE_BAGS the script that came with it. Every sampling of
the bags (with its own split of the patients) is trained several times. SimCLR is trained at witness rate 0.1 and shared
by the other rates of the same sampling and training. Rows differ from the recipe in what they name; `--row` adds one of
your own. What is there already is not trained again; `--starts` takes bags and SimCLR from the OUT of another call,
whose settings of refinement may differ. Runs that failed, or that OUT holds with other settings, are named and left
out. Settings are chosen with `--split val`; `--split test` is for the end.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.metrics import average_precision_score, roc_auc_score

from its2clr.cohort import pack_images, read_manifest
from its2clr.experiments.execute import Task, execute
from its2clr.experiments.plan import Job
from its2clr.experiments.spec import Resampling, Stage
from its2clr.files import read_json, write_json
from its2clr.run.saved import read_run_config
from its2clr.settings import parse_override, resolve_config

SHARED_RATE = 0.1
PLAIN: dict[str, Any] = {
    "refine.reader": None,
    "refine.threshold_rule": "fixed",
    "refine.aggregator_seeds": 1,
}
"""The paper's way to pseudo labels: the run's own aggregator, one seed, a fixed threshold."""
CROSS_ENTROPY: dict[str, Any] = {"refine.objective": "cross_entropy", "refine.learning_rate": 0.03}
"""At the learning rate that is best for it on validation patients."""
ROWS: dict[str, dict[str, Any]] = {
    "SimCLR": {},
    "ItS2CLR": {},
    "Ground-truth finetuning": {"refine.labels": "ground_truth"},
    "Cross-entropy": {**CROSS_ENTROPY, "refine.self_paced": False},
    "Cross-entropy, self-paced": CROSS_ENTROPY,
    "without iteration": {"refine.iterative": False},
    "without self-pacing": {"refine.self_paced": False},
    "pseudo labels as in the paper": PLAIN,
    "reader: the run's aggregator": {"refine.reader": None},
    "threshold 0.3": {"refine.threshold_rule": "fixed"},
    "one aggregator per update": {"refine.aggregator_seeds": 1},
}
WHOLE: dict[str, Any] = {"refine.views.crop_scale": None}
SLOW: dict[str, Any] = {"refine.initial_ratio": 0.2, "refine.final_ratio": 0.8}
SHORT: dict[str, Any] = {"refine.epochs": 30, "refine.warmup_epochs": 5}
BEFORE = {**WHOLE, **SLOW, **SHORT}
JOINT = {"refine.objective": "joint", "plugins": [str(Path(__file__).with_name("joint_objective.py"))]}
TRIED: dict[str, dict[str, Any]] = {
    "whole cells": WHOLE,
    "whole cells, pacing 0.2 to 0.8": {**WHOLE, **SLOW},
    "whole cells, 30 epochs": {**WHOLE, **SHORT},
    "pacing 0.2 to 0.8, 30 epochs": {**SLOW, **SHORT},
    "whole cells, pacing 0.2 to 0.8, 30 epochs": BEFORE,
    "whole cells, pacing 0.2 to 0.8, 30 epochs, learning rate 0.2": {**BEFORE, "refine.learning_rate": 0.2},
    "whole cells, pacing 0.2 to 0.8, 30 epochs, joint loss": {**BEFORE, **JOINT},
}
"""What was compared on validation patients before the recipe became what it is, by what differs from it."""
KNOWN = {**ROWS, **TRIED}
ABSENT = "not there"


def main() -> None:
    args = arguments()
    mine = dict(args.row)
    rows = {**KNOWN, **mine}
    names = list(dict.fromkeys([*(ROWS if args.rows is None else args.rows), *mine]))
    chosen = dict(parse_override(text) for text in args.set)
    cohorts = {
        (sampling, rate): packed(args, sampling, rate)
        for sampling in range(args.samplings)
        for rate in sorted({SHARED_RATE, *args.rates})
    }
    starts: dict[Job, Task] = {}
    tasks: dict[Job, Task] = {}
    of_rows: dict[tuple[str, float, int, int], Task] = {}
    for (sampling, rate), cohort in cohorts.items():
        for seed in range(args.trainings):
            settings = as_settings(args.recipe, {**of_start(chosen), "seed": seed})
            start = Job("pretrain", str(cohort), Resampling(), (), seed)
            folder = run_folder(args.starts, sampling, SHARED_RATE, "start", seed)
            if rate == SHARED_RATE:
                starts[start] = Task(start, folder, cohort, settings, (), of_features=False)
                tasks[start] = starts[start]
            else:
                settings["pretrain"]["start"] = str(folder.resolve())
                own = run_folder(args.out, sampling, rate, "start", seed)
                tasks[start] = Task(start, own, cohort, settings, (), of_features=False)
            for row in names if rate in args.rates else ():
                task = of_row(row, rows[row], args.recipe, chosen, cohort, folder, seed)
                task = replace(task, folder=run_folder(args.out, sampling, rate, row, seed))
                tasks[task.job] = of_rows[row, rate, sampling, seed] = task
    failures = {} if args.no_train else execute(starts, args.workers, report)
    failures |= {} if args.no_train else execute(tasks, args.workers, report)
    found, missing = [], []
    for (row, rate, sampling, seed), task in sorted(of_rows.items(), key=lambda one: (one[0][2], one[0][1])):
        which = {"row": row, "rate": rate, "sampling": sampling, "training": seed}
        why = failures.get(task.job) or unusable(task)
        if why is None:
            found.append({**which, **measured(task.folder, args.split)})
        elif not (args.no_train and why == ABSENT):
            missing.append({**which, "why": str(why)})
    say(found)
    for one in missing:
        print("missing: {row}, rate {rate:g}, sampling {sampling}, training {training}: {why}".format(**one))
    if args.json:
        write_json(args.json, {"split": args.split, "settings": chosen, "runs": found, "missing": missing})
    sys.exit(bool(failures))


def unusable(task: Task) -> str | None:
    """Why what is in a run's folder is not what was asked for; None if it is."""
    if not (task.folder / "results.json").is_file():
        return ABSENT
    opened = read_run_config(task.folder)
    assert opened is not None, f"{task.folder}: results without a config"
    here = opened[0].model_dump(mode="json")
    differing = [key for key in here if key != "engine" and here[key] != task.settings[key]]
    return f"other settings of {', '.join(differing)}: give another OUT" if differing else None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", type=Path)
    parser.add_argument("make_bags", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rates", type=float, nargs="+", default=[SHARED_RATE])
    parser.add_argument("--samplings", type=int, default=3)
    parser.add_argument("--trainings", type=int, default=3)
    parser.add_argument("--rows", nargs="*", choices=list(KNOWN), metavar="ROW", help=f"of: {'; '.join(KNOWN)}")
    parser.add_argument("--row", type=own_row, action="append", default=[], metavar="'NAME: KEY=VALUE; KEY=VALUE'")
    parser.add_argument("--recipe", default="malaria-smears")
    parser.add_argument("--tile-size", type=int, default=96)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--split", choices=["val", "test"], default="val")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--starts", type=Path, help="OUT of another call")
    parser.add_argument("--no-train", action="store_true", help="report what is there")
    args = parser.parse_args()
    args.starts = args.starts or args.out
    return args


def own_row(text: str) -> tuple[str, dict[str, Any]]:
    """Name and changes of a row given as `NAME: KEY=VALUE; KEY=VALUE`."""
    name, colon, changes = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 'NAME: KEY=VALUE; KEY=VALUE'")
    return name.strip(), dict(parse_override(change) for change in changes.split(";"))


def of_start(chosen: dict[str, Any]) -> dict[str, Any]:
    """The settings that a start depends on."""
    return {key: value for key, value in chosen.items() if key.split(".")[0] not in {"refine", "aggregator"}}


def as_settings(recipe: str, changes: dict[str, Any]) -> dict[str, Any]:
    return resolve_config(recipe, changes).model_dump(mode="json")


def packed(args: argparse.Namespace, sampling: int, rate: float) -> Path:
    """Bags of one sampling as a cohort."""
    folder = args.starts / f"sampling-{sampling}" / f"rate-{rate:g}"
    cohort = folder / f"cohort-{args.tile_size}"
    if not (cohort / "bags.csv").is_file():
        options = ["--witness-rate", str(rate), "--seed", str(sampling)]
        subprocess.run([sys.executable, args.make_bags, args.cells, folder, *options], check=True, capture_output=True)
        manifest = read_manifest(folder / "bags.csv", folder / "instances.csv", args.cells)
        pack_images(manifest, cohort, tile_size=args.tile_size)
    return cohort


def run_folder(out: Path, sampling: int, rate: float, row: str, seed: int) -> Path:
    name = "".join(letter if letter.isalnum() else "-" for letter in row)
    return out / f"sampling-{sampling}" / f"rate-{rate:g}" / name / f"seed-{seed}"


def of_row(
    row: str, changes: dict[str, Any], recipe: str, chosen: dict[str, Any], cohort: Path, start: Path, seed: int
) -> Task:
    settings = as_settings(recipe, {**chosen, **changes, "seed": seed})
    settings["pretrain"]["start"] = str(start.resolve())
    reader = as_settings(recipe, chosen)["refine"]["reader"]
    readers = (None,) if reader is None or reader["name"] == settings["aggregator"]["name"] else (None, reader["name"])
    stage: Stage = "aggregate" if row == "SimCLR" else "refine"
    job = Job(stage, str(cohort), Resampling(), (("row", json.dumps(row)),), seed)
    return Task(job, start, cohort, settings, readers, of_features=False)


def report(outcome: Any, done: int, total: int) -> None:
    ending = f"FAILED: {outcome.failure}" if outcome.failure else f"{outcome.seconds:.0f} s"
    print(f"[{done}/{total}] {Path(outcome.job.cohort).parent.parent.name} {Path(outcome.job.cohort).parent.name} "
          f"{outcome.job.describe()} {outcome.job.seed}: {ending}", flush=True)  # fmt: skip


def measured(run: Path, split: str) -> dict[str, Any]:
    """Metrics of the mean score over retrainings on a split, for every aggregator; and what the rounds found."""
    results = read_json(run / "results.json")
    bags, instances = pd.read_csv(run / "bag_predictions.csv"), pd.read_parquet(run / "predictions.parquet")
    bags, instances = bags[bags["split"] == split], instances[instances["split"] == split]
    encoder = "refined" if "refined" in results else "start"
    found: dict[str, Any] = {"aggregators": {}}
    for name in bags.loc[bags["encoder"] == encoder, "aggregator"].unique():
        own = bags.query("encoder == @encoder and aggregator == @name")
        of_instances = instances.query("encoder == @encoder and aggregator == @name")
        found["aggregators"][name] = {
            "bag_auc": float(roc_auc_score(own["label"], own["probability"])),
            "instance_auc": float(roc_auc_score(of_instances["label"], of_instances["probability"])),
            "instance_auprc": float(average_precision_score(of_instances["label"], of_instances["probability"])),
        }
    if "rounds" in results:
        kept = ("epoch", "validation_auc", "instance_auc", "instance_max_f1", "precision", "recall", "threshold")
        kept += ("contrast_auc", "median_auc", "false_positive_share")
        health = results["health"]["rounds"]
        together = [{**one, **other} for one, other in zip(results["rounds"], health, strict=True)]
        found["rounds"] = [{key: entry[key] for key in kept if key in entry} for entry in together]
        found |= {"best_epoch": results["refine"]["best_epoch"], "warnings": results["health"]["warnings"]}
    return found


def say(found: list[dict[str, Any]]) -> None:
    """Mean and deviation over samplings and trainings of every row, rate and aggregator."""
    flat = pd.DataFrame(
        [
            {**{key: one[key] for key in ("rate", "row", "sampling", "training")}, "aggregator": name, **metrics}
            for one in found
            for name, metrics in one["aggregators"].items()
        ]
    )
    if flat.empty:
        print("nothing finished")
        return
    for (rate, row, name), some in flat.groupby(["rate", "row", "aggregator"], sort=False):
        numbers = [
            f"{metric} {some[metric].mean():.3f} ± {np.std(some[metric]):.3f}"
            for metric in ("bag_auc", "instance_auc", "instance_auprc")
        ]
        print(f"rate {rate:g}  {row:<32} {name:<12} n={len(some)}  {'  '.join(numbers)}")
    for one in found:
        if "rounds" in one and one["training"] == 0 and one["sampling"] == 0:
            curve = [
                f"{entry['epoch']}: {entry['validation_auc']:.2f}/{entry.get('instance_auc', np.nan):.3f}"
                f"/{entry.get('precision', np.nan):.2f}"
                for entry in one["rounds"]
            ]
            print(f"  {one['rate']:g} {one['row']}: best {one['best_epoch']}  {', '.join(curve)}")


if __name__ == "__main__":
    main()

"""How good the first pseudo labels are by how they are read: aggregator, seeds, threshold (docs/results-real.md).

    python benchmarks/malaria_readers.py RUN benchmarks/results/malaria_readers.json [--repeats 5]

RUN is a run of the recipe `malaria-smears` whose SimCLR is trained. Its encoder stays as it is; every row trains the
aggregators of one round anew, several times from other seeds. Ground truth of training instances is for measuring only.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from its2clr.aggregators.config import AggregatorTraining
from its2clr.aggregators.data import BagFeatures
from its2clr.cohort import Cohort
from its2clr.encoders.encoder import Encoder
from its2clr.encoders.weights import load_network
from its2clr.engine.devices import Engine
from its2clr.evaluation.instances import pseudo_label_quality
from its2clr.files import write_json
from its2clr.refine.pseudo_labels import partition
from its2clr.refine.rounds import Bags, aggregator_seeds, run_round
from its2clr.run.directory import read_run_config

RULE = "negative_bags"
ROWS: dict[str, tuple[str, int, str]] = {
    "as in the paper: the run's DS-MIL, one, threshold 0.3": ("own", 1, "fixed"),
    "the same without dropout": ("own, no dropout", 1, "fixed"),
    "five of them": ("own", 5, "fixed"),
    "five, threshold from negative bags": ("own", 5, RULE),
    "smooth maximum, one, threshold 0.3": ("reader", 1, "fixed"),
    "smooth maximum, one, threshold from negative bags": ("reader", 1, RULE),
    "smooth maximum, five, threshold from negative bags (the recipe)": ("reader", 5, RULE),
    "smooth maximum without dropout, five, threshold from negative bags": ("reader, no dropout", 5, RULE),
    "smooth maximum, a quarter of instances left out, five, negative bags": ("reader, left out", 5, RULE),
}
"""Aggregator, how many of them, rule of the threshold."""


class Frozen(Bags):
    """Bags of which every round sees the same encoder: represented once."""

    known: BagFeatures | None = None

    def features(self, encoder: Encoder, engine: Engine) -> BagFeatures:
        if self.known is None:
            object.__setattr__(self, "known", super().features(encoder, engine))
        assert self.known is not None
        return self.known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("json", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    opened = read_run_config(args.run)
    if opened is None:
        parser.error(f"{args.run}: not the folder of a run")
    config, folder = opened
    if config.refine.reader is None:
        parser.error(f"{args.run}: refine.reader is not set there")
    engine = Engine(config.engine)
    cohort = Cohort.open(folder)
    train, validation = Frozen(cohort.split("train"), engine), Frozen(cohort.split("val"), engine)
    encoder = load_network(args.run / "checkpoints" / "encoder-simclr.safetensors").to(engine.device).encoder
    kinds = {
        "own": config.aggregator,
        "own, no dropout": without_dropout(config.aggregator),
        "reader": config.refine.reader,
        "reader, no dropout": without_dropout(config.refine.reader),
        "reader, left out": with_option(config.refine.reader, "instance_dropout", 0.25),
    }
    truth = cohort.split("train").instance_labels()
    found: dict[str, list[dict[str, Any]]] = {}
    for row, (kind, count, rule) in ROWS.items():
        settings = config.refine.model_copy(update={"threshold_rule": rule})
        found[row] = []
        for repeat in range(args.repeats):
            seeds = aggregator_seeds(repeat, count)
            one = run_round(encoder, train, validation, kinds[kind], settings, seeds, engine)
            mean = one.probabilities.mean(axis=0)
            pools = partition(mean, train.labels[train.bag_of_instance], one.threshold, 1.0, train.bag_of_instance)
            selected = np.zeros(len(truth), dtype=np.int64)
            selected[pools.pseudo_positive], selected[pools.pseudo_negative] = 1, -1
            quality = pseudo_label_quality(truth, mean, selected)
            precision, recall = quality["precision"], quality["recall"]
            found[row].append(
                {
                    "instance_auc": quality["instance_auc"],
                    "precision": precision,
                    "recall": recall,
                    "f1": 2 * precision * recall / (precision + recall),
                    "threshold": one.threshold,
                    "validation_auc": one.validation_auc,
                }
            )
        print(row, {key: f"{np.mean([one[key] for one in found[row]]):.3f}" for key in found[row][0]}, flush=True)
    write_json(args.json, {"rows": found})


def with_option(aggregator: AggregatorTraining, name: str, value: float) -> AggregatorTraining:
    return aggregator.model_copy(update={"options": {**aggregator.options, name: value}})


def without_dropout(aggregator: AggregatorTraining) -> AggregatorTraining:
    options = {name: value for name, value in aggregator.options.items() if name != "dropout"}
    return aggregator.model_copy(update={"options": options})


if __name__ == "__main__":
    main()

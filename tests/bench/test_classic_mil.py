"""The benchmark on classic features: what it reports of its repeats."""

import statistics
from pathlib import Path

import numpy as np
import pytest
import torch

from its2clr.bag_features import BagFeatures

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("repeats", [1, 3])
def test_accuracies_have_the_sample_deviation_over_repeats(repeats, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import classic_mil

    truth = np.arange(40) % 2
    bags = BagFeatures(torch.zeros(40, 1), torch.arange(41), torch.from_numpy(truth).float())
    logits = np.random.default_rng(0).normal(size=(2, 10 * repeats, 40))
    monkeypatch.setattr(classic_mil, "logits_by_epoch", lambda *_: logits)
    mean, deviation = classic_mil.measure("dsmil", bags, repeats, epochs=2)["last"]
    by_repeat = []
    for repeat in range(repeats):
        folds = list(enumerate(classic_mil.folds(truth, repeats)))[10 * repeat : 10 * repeat + 10]
        right = [np.mean([(logits[1, model, bag] > 0) == truth[bag] for bag in test]) for model, (_, test) in folds]
        by_repeat.append(statistics.mean(right))
    assert mean == pytest.approx(statistics.mean(by_repeat))
    assert deviation == (pytest.approx(statistics.stdev(by_repeat)) if repeats > 1 else None)

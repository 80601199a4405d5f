"""Switching a baseline on changes what it names and nothing else: the same start, batches, refresh and selection."""

import numpy as np
import pandas as pd
import pytest
import torch
from tests.conftest import TINY

from its2clr.cohort import Cohort
from its2clr.refine import learner
from its2clr.run.opening import open_run
from its2clr.training import EpochResult

REFINE = ["refine.epochs=6", "refine.warmup_epochs=2", "refine.refresh_every=2"]


@pytest.fixture(scope="module")
def start(tiny_cohort, tmp_path_factory):
    stages = open_run(tmp_path_factory.mktemp("start"), tiny_cohort, "demo", TINY, quiet=True)
    stages.pretrain()
    return stages.run.path


@pytest.fixture
def batches(tiny_cohort, start, tmp_path, monkeypatch):
    """Gives the batches of every epoch of a refinement with some switches; the encoder is nudged, not trained."""

    def record(*switches):
        seen = []

        def instead_of_training(step, batches, rates, keys):
            seen.append(batches)
            with torch.no_grad():  # so that rounds differ, in the same way for every variant
                step.network.module.encoder.backbone.conv1.weight.mul_(1 + 0.1 * len(seen))
            return EpochResult(loss=1.0, spread=1.0, tiles_per_second=1.0, seconds=1.0)

        monkeypatch.setattr(learner, "train_epoch", instead_of_training)
        run = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        settings = [*TINY, *REFINE, f"pretrain.start={start}", *switches]
        open_run(run, tiny_cohort, "demo", settings, quiet=True).refine()
        return seen, [pd.read_parquet(path / "pseudo_labels.parquet") for path in sorted((run / "rounds").iterdir())]

    return record


def same(left, right, part):
    return [torch.equal(getattr(a, part), getattr(b, part)) for a, b in zip(left, right, strict=True)]


def test_cross_entropy_changes_the_objective_only(batches):
    full, rounds = batches()
    other, other_rounds = batches("refine.objective=cross_entropy")
    for part in ("indices", "labels", "anchors"):
        assert all(same(full, other, part))
    for a, b in zip(rounds, other_rounds, strict=True):
        pd.testing.assert_frame_equal(a, b)


def test_positive_warm_up_changes_the_anchors_of_the_warm_up_only(batches):
    full, _ = batches()
    other, _ = batches("refine.warmup_anchors=positive")
    assert all(same(full, other, "indices"))
    assert all(same(full, other, "labels"))
    assert same(full, other, "anchors") == [False, False, True, True, True, True]
    assert torch.equal(full[0].anchors, ~other[0].anchors)
    assert torch.equal(other[0].anchors, other[0].labels == 1)


def test_without_iteration_the_first_pseudo_labels_stay(batches):
    full, rounds = batches()
    other, other_rounds = batches("refine.iterative=false")
    assert all(same(full[:2], other[:2], "indices"))
    for a, b in zip(rounds, other_rounds, strict=True):  # what the aggregators find is the same
        assert np.array_equal(a["probability"], b["probability"])
    first = other_rounds[0]
    selected = [table["selected"].to_numpy() for table in other_rounds]
    for later in selected[1:]:  # the first labels, more and more of them
        assert set(np.flatnonzero(later == 1)) <= set(np.flatnonzero(first["pseudo_label"] == 1))


def test_without_self_pacing_every_pseudo_label_is_used_from_the_start(batches):
    other, rounds = batches("refine.self_paced=false", "refine.iterative=false")
    table = rounds[0]
    assert np.array_equal(table["selected"] == 1, table["pseudo_label"] == 1)
    assert all(batch.anchors.all() for batch in other)
    for later in rounds[1:]:
        assert np.array_equal(later["selected"], table["selected"])
    used = set(torch.cat([batch.indices[batch.labels == 1] for batch in other]).tolist())
    assert used <= set(np.flatnonzero(table["pseudo_label"] == 1))
    assert len(used) > 0.8 * (table["pseudo_label"] == 1).sum()


def test_self_pacing_lets_more_in(batches):
    _, rounds = batches("refine.iterative=false")
    positives = [int((table["selected"] == 1).sum()) for table in rounds]
    assert positives[0] == int((rounds[0]["pseudo_label"] == 1).sum())  # warm-up: all of them, against negative bags
    assert not (rounds[0]["selected"] == -1).any()
    assert positives[1] <= positives[2] <= positives[3]
    assert positives[1] < positives[3]


def test_ground_truth_changes_the_labels_only(batches, tiny_cohort):
    other, rounds = batches("refine.labels=ground_truth")
    truth = Cohort.open(tiny_cohort).split("train").instance_labels()
    for batch in other:
        assert np.array_equal(truth[batch.indices.numpy()], batch.labels.numpy())
    full, full_rounds = batches()
    for a, b in zip(rounds, full_rounds, strict=True):
        assert np.array_equal(a["probability"], b["probability"])
    assert all(a.indices.shape == b.indices.shape for a, b in zip(full, other, strict=True))


def test_a_reader_makes_the_pseudo_labels_and_nothing_else(batches):
    (plain, rounds), (read, read_rounds) = batches(), batches("refine.reader={name: smooth_max, epochs: 4}")
    assert not np.array_equal(rounds[0]["probability"], read_rounds[0]["probability"])
    assert [len(one.indices) for one in plain] == [len(one.indices) for one in read]
    assert all(same(plain, read, "labels"))


def test_a_threshold_of_negative_bags_changes_who_is_positive_only(batches):
    rule = ["refine.threshold_rule=negative_bags", "refine.false_positive_rate=0.3"]
    (_, rounds), (_, other) = batches(), batches(*rule)
    assert np.array_equal(rounds[0]["probability"], other[0]["probability"])
    assert not np.array_equal(rounds[0]["pseudo_label"], other[0]["pseudo_label"])

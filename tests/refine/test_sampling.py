from types import SimpleNamespace

import numpy as np
import pytest

from its2clr.config import RefineConfig
from its2clr.errors import TrainingError
from its2clr.refine.labels import InstanceLabels
from its2clr.refine.pseudo_labels import Pools
from its2clr.refine.sampling import cycle, epoch_pools, sample_batches

POOLS = Pools(np.arange(0, 40), np.arange(40, 47), np.arange(50, 80))


def draw(**changes):
    arguments = {"pools": POOLS, "steps": 30, "batch_size": 20, "positive_fraction": 0.2, "warmup_anchors": None}
    arguments |= changes
    return sample_batches(**arguments, generator=np.random.default_rng(0))


def test_batches_hold_the_wanted_share_of_positives_from_the_right_pools():
    batches = draw()
    labels, indices = batches.labels.numpy(), batches.indices.numpy()
    assert (labels.sum(1) == 4).all()
    assert np.isin(indices[labels == 1], POOLS.pseudo_positive).all()
    assert set(indices[labels == 0]) == {*POOLS.negative_bag, *POOLS.pseudo_negative}
    assert batches.anchors.all()


@pytest.mark.parametrize(("side", "label"), [("negative", 0), ("positive", 1)])
def test_warm_up_takes_negatives_from_negative_bags_and_anchors_from_one_side(side, label):
    batches = draw(warmup_anchors=side)
    labels, indices = batches.labels.numpy(), batches.indices.numpy()
    assert np.isin(indices[labels == 0], POOLS.negative_bag).all()
    assert set(indices[labels == 1]) == set(POOLS.pseudo_positive)
    assert np.array_equal(batches.anchors.numpy(), labels == label)


def test_every_member_of_a_pool_comes_equally_often():
    counts = np.bincount(cycle(np.arange(7), 7 * 5 + 3, np.random.default_rng(1)))
    assert set(counts) <= {5, 6}
    assert counts.sum() == 38


def test_positives_are_spread_over_the_columns():
    assert set(draw().labels.numpy()[0].nonzero()[0]) != set(range(4))


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_both_kinds_are_in_every_batch(fraction):
    assert set(draw(positive_fraction=fraction).labels.sum(1).tolist()) <= {1, 19}


def test_same_generator_same_batches():
    assert (draw().indices == draw().indices).all()


@pytest.mark.parametrize(
    ("empty", "said"), [("negative_bag", "must hold negative bags"), ("pseudo_positive", "lower refine.threshold")]
)
def test_an_empty_pool_is_said(empty, said):
    pools = POOLS._replace(**{empty: np.empty(0, dtype=np.int64)})
    with pytest.raises(TrainingError, match=said):
        draw(pools=pools, warmup_anchors="negative")


@pytest.mark.parametrize(
    ("settings", "positives"),
    [({}, []), ({"top_instance": True}, [1]), ({"top_instance": True, "labels": "ground_truth"}, [])],
)
def test_the_top_instance_counts_only_where_the_settings_say_so(settings, positives):
    train = SimpleNamespace(labels=np.array([1, 0]), bag_of_instance=np.array([0, 0, 1]))
    labels = InstanceLabels(np.array([0.1, 0.2, 0.0], np.float32), 0.3)
    pools = epoch_pools(labels, train, RefineConfig(self_paced=False, **settings), 1)
    assert pools.pseudo_positive.tolist() == positives

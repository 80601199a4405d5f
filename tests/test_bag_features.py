"""BagFeatures: padded batches against slicing, and what it refuses."""

import numpy as np
import pytest
import torch

from its2clr.bag_features import BagFeatures
from its2clr.errors import InputError

SIZES = (3, 1, 6, 2, 4)


def make() -> tuple[list[np.ndarray], BagFeatures]:
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal((size, 5)).astype(np.float32) for size in SIZES]
    return arrays, BagFeatures.from_arrays(arrays, [0, 1, 0, 1, 1])


def test_batch_holds_the_bags_asked_for():
    arrays, bags = make()
    indices = torch.tensor([[3, 0], [1, 3]])
    features, mask = bags.batch(indices)
    assert features.shape == (2, 2, 3, 5)  # padded to the largest bag of the request, not of the set
    for row in range(2):
        for column in range(2):
            bag = arrays[indices[row, column]]
            assert mask[row, column].tolist() == [position < len(bag) for position in range(3)]
            np.testing.assert_array_equal(features[row, column, : len(bag)].numpy(), bag)
    assert bags.batch(indices, length=6)[0].shape == (2, 2, 6, 5)


def test_batch_of_the_last_bag_stays_inside():
    arrays, bags = make()
    features, mask = bags.batch(torch.tensor([4, 2]))
    np.testing.assert_array_equal(features[0][mask[0]].numpy(), arrays[4])


def test_subset_keeps_order_and_labels():
    arrays, bags = make()
    subset = bags.subset([4, 1, 4])
    np.testing.assert_array_equal(subset.features.numpy(), np.concatenate([arrays[4], arrays[1], arrays[4]]))
    assert subset.offsets.tolist() == [0, 4, 5, 9]
    assert subset.labels.tolist() == [1, 1, 1]
    assert BagFeatures.from_arrays(arrays).subset([0]).labels is None


@pytest.mark.parametrize(("bags_per_batch", "instances_per_batch"), [(1, 100), (2, 100), (5, 8), (5, 1), (9, 100)])
def test_batches_cover_every_bag_once_within_limits(bags_per_batch, instances_per_batch):
    _, bags = make()
    batches = [batch.tolist() for batch in bags.batches(bags_per_batch, instances_per_batch)]
    assert sorted(bag for batch in batches for bag in batch) == [0, 1, 2, 3, 4]
    for batch in batches:
        assert len(batch) <= bags_per_batch
        assert len(batch) == 1 or len(batch) * max(SIZES[bag] for bag in batch) <= instances_per_batch
    if (bags_per_batch, instances_per_batch) == (9, 100):
        assert len(batches) == 1


@pytest.mark.parametrize(
    ("features", "offsets", "labels", "message"),
    [
        (torch.zeros(4, 2).double(), [0, 4], None, "float32"),
        (torch.zeros(4, 2), [0, 3], None, "offsets"),
        (torch.zeros(4, 2), [0, 2, 2, 4], None, "bag 1 has no instances"),
        (torch.tensor([[0.0], [0.0], [float("nan")]]), [0, 2, 3], None, r"bag 1 .*not finite \(row 2\)"),
        (torch.zeros(4, 2), [0, 2, 4], [0], "expected 2 labels"),
        (torch.zeros(4, 2), [0, 2, 4], [0, 2], "bag 1 has 2"),
    ],
)
def test_refuses(features, offsets, labels, message):
    with pytest.raises(InputError, match=message):
        BagFeatures(features, torch.tensor(offsets), None if labels is None else torch.tensor(labels))


def test_from_arrays_names_the_bag_that_differs():
    with pytest.raises(InputError, match=r"bag 1 has features of shape \(2, 3\), expected \(instances, 5\)"):
        BagFeatures.from_arrays([np.zeros((2, 5)), np.zeros((2, 3))])

"""Small bags for the aggregators' tests."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from its2clr.bag_features import BagFeatures


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Tensors here are tiny: threads would only wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def separable_bags(seed: int, bags: int = 40, feature_dim: int = 8) -> BagFeatures:
    """Ragged bags of noise; in positive bags a fifth of the instances is shifted."""
    generator = np.random.default_rng(seed)
    labels = np.arange(bags) % 2
    arrays = []
    for label in labels:
        bag = generator.standard_normal((int(generator.integers(3, 12)), feature_dim)).astype(np.float32)
        if label:
            bag[: max(1, len(bag) // 5), :3] += 4.0
        arrays.append(generator.permutation(bag))
    return BagFeatures.from_arrays(arrays, labels)

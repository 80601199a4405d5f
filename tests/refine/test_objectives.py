import math

import numpy as np
import pytest
import torch
from tests.conftest import TINY

from its2clr.config import RefineConfig, resolve_config
from its2clr.encoders.weights import create_network
from its2clr.refine.objectives import cross_entropy_objective, prepare_objective


def test_cross_entropy_equals_the_slow_reference():
    logits = torch.linspace(-3, 3, 8)[:, None]
    labels = torch.tensor([0, 1] * 4)
    expected = np.mean(
        [
            -math.log(1 / (1 + math.exp(-z))) if y else -math.log(1 - 1 / (1 + math.exp(-z)))
            for z, y in zip(logits[:, 0].tolist(), labels.tolist(), strict=True)
        ]
    )
    assert cross_entropy_objective(logits, labels, None).item() == pytest.approx(expected, rel=1e-5)


def test_heads():
    network = create_network(resolve_config("demo", TINY))
    same, _ = prepare_objective(network, RefineConfig(), seed=0)
    assert same is network
    other, _ = prepare_objective(network, RefineConfig(objective="cross_entropy"), seed=0)
    assert other.encoder is network.encoder
    assert other(torch.rand(4, 3, 32, 32))[1].shape == (4, 1)
    again, _ = prepare_objective(network, RefineConfig(objective="cross_entropy"), seed=0)
    assert torch.equal(other.head.weight, again.head.weight)

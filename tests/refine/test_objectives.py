import math

import numpy as np
import pytest
import torch
from tests.conftest import TINY

from its2clr.config import RefineConfig
from its2clr.encoders.weights import create_network
from its2clr.errors import InputError
from its2clr.losses.cross_entropy import cross_entropy_loss
from its2clr.refine.objectives import OBJECTIVES, Prepared, register_objective
from its2clr.settings import resolve_config


def test_cross_entropy_equals_the_slow_reference():
    logits = torch.linspace(-3, 3, 8)[:, None]
    labels = torch.tensor([0, 1] * 4)
    expected = np.mean(
        [
            -math.log(1 / (1 + math.exp(-z))) if y else -math.log(1 - 1 / (1 + math.exp(-z)))
            for z, y in zip(logits[:, 0].tolist(), labels.tolist(), strict=True)
        ]
    )
    assert cross_entropy_loss(logits, labels, None).item() == pytest.approx(expected, rel=1e-5)


def test_heads():
    network = create_network(resolve_config("demo", TINY))
    prepared = OBJECTIVES.find("supervised_contrastive")(network, RefineConfig(), 0)
    assert prepared.network is network
    assert prepared.contrastive
    other = OBJECTIVES.find("cross_entropy")(network, RefineConfig(), 0)
    assert other.network.encoder is network.encoder
    assert not other.contrastive
    assert other.network(torch.rand(4, 3, 32, 32))[1].shape == (4, 1)
    again = OBJECTIVES.find("cross_entropy")(network, RefineConfig(), 0)
    assert torch.equal(other.network.head.weight, again.network.head.weight)


def test_an_unknown_objective_is_named_with_its_closest():
    assert {"cross_entropy", "supervised_contrastive"} <= set(OBJECTIVES.names())
    with pytest.raises(InputError, match="unknown objective 'cross_entrpy', did you mean 'cross_entropy'"):
        OBJECTIVES.find("cross_entrpy")


def test_a_name_belongs_to_one_objective():
    def another(network, config, seed):
        return Prepared(network, lambda outputs, labels, anchors: outputs.sum())

    with pytest.raises(InputError, match="an objective named 'cross_entropy' already"):
        register_objective("cross_entropy")(another)

"""The adapter over frozen features, and the views it is trained with."""

import numpy as np
import pytest
import torch

from its2clr.config import AdapterConfig, EncoderConfig, RunConfig
from its2clr.encoders.adapter import FeatureAdapter, FeatureViews, adapter_encoder
from its2clr.encoders.encoder import create_encoder
from its2clr.encoders.weights import create_network, load_network, save_network
from its2clr.errors import InputError

CPU = torch.device("cpu")


@pytest.fixture
def features() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(40_000, 6, generator=generator) * torch.tensor([1.0, 0.01, 30, 2, 5, 0]) + torch.arange(6.0)


@pytest.fixture
def adapter(features: torch.Tensor) -> FeatureAdapter:
    torch.manual_seed(0)
    made = FeatureAdapter(6, AdapterConfig(hidden_dim=4))
    made.learn_statistics(features)
    return made


def test_it_starts_as_the_identity_and_can_change(adapter: FeatureAdapter, features: torch.Tensor) -> None:
    assert torch.equal(adapter.train()(features), features)
    torch.nn.init.normal_(adapter.output.weight)
    assert not torch.equal(adapter(features), features)


def test_it_does_what_its_formula_says(adapter: FeatureAdapter, features: torch.Tensor) -> None:
    torch.nn.init.normal_(adapter.output.weight)
    h = features[7].double().numpy()
    mean, std = features.double().numpy().mean(0), features.double().numpy().std(0)
    std[5] = 1.0  # it never changes
    parts = (adapter.hidden.weight, adapter.hidden.bias, adapter.output.weight, adapter.output.bias)
    w1, b1, w2, b2 = (part.detach().double().numpy() for part in parts)
    inner = torch.nn.functional.gelu(torch.from_numpy(w1 @ ((h - mean) / std) + b1)).numpy()
    expected = h + std * (w2 @ inner + b2)
    np.testing.assert_allclose(adapter.eval()(features[7:8])[0].detach().numpy(), expected, rtol=1e-4, atol=1e-4)


def test_views_have_the_noise_and_dropout_that_were_asked_for(adapter: FeatureAdapter, features: torch.Tensor) -> None:
    adapter.config = AdapterConfig(feature_noise=0.5, feature_dropout=0.25)
    views = FeatureViews(adapter, CPU, 1, "refine", 2)
    rows = torch.arange(20_000)
    both = views.pair(features, rows)
    first, second = both.split(len(rows))
    assert not torch.equal(first, second)
    changing = slice(0, 5)
    dropped = (first == adapter.mean)[:, changing]
    assert dropped.float().mean() == pytest.approx(0.25, abs=0.01)
    noise = ((first - features[rows]) / adapter.std)[:, changing][~dropped]
    assert noise.std() == pytest.approx(0.5, abs=0.01)
    views.reseed(1, "refine", 2)
    assert torch.equal(views.pair(features, rows), both)
    adapter.config = AdapterConfig(feature_noise=0, feature_dropout=0)
    assert torch.equal(views.pair(features, rows)[: len(rows)], features[rows])


def test_a_network_is_saved_with_its_statistics(features: torch.Tensor, tmp_path) -> None:
    config = RunConfig(
        encoder=EncoderConfig(name="features", options={"feature_dim": 6}), adapter=AdapterConfig(hidden_dim=3)
    )
    network = create_network(config)
    assert isinstance(network.encoder, FeatureAdapter)
    network.encoder.learn_statistics(features)
    torch.nn.init.normal_(network.encoder.output.weight)
    save_network(tmp_path / "a.safetensors", network, config, {})
    loaded = load_network(tmp_path / "a.safetensors")
    for one, other in zip(network.eval()(features[:50]), loaded.eval()(features[:50]), strict=True):
        assert torch.equal(one, other)
    head_input = network.encoder.standardised(features)
    assert head_input[:, :5].std(0).numpy() == pytest.approx(np.ones(5), abs=1e-3)


def test_what_is_wrong_is_said(adapter: FeatureAdapter) -> None:
    with pytest.raises(InputError, match="cohorts of features"):
        create_encoder("features")
    with pytest.raises(InputError, match=r"\(N, 6\)"):
        adapter.learn_statistics(torch.zeros(3, 5))
    assert adapter_encoder(RunConfig()) == RunConfig().encoder

"""The encoder of a cohort of features: a small residual adapter that starts as the identity, and views of features."""

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from its2clr.config import FEATURES, AdapterConfig, EncoderConfig, RunConfig
from its2clr.encoders.encoder import Encoder
from its2clr.engine.mapped_rows import ROWS_AT_ONCE, give_back
from its2clr.errors import InputError
from its2clr.seeds import derive_seed

_SMALLEST_DEVIATION = 1e-6


class FeatureAdapter(Encoder):
    r"""A residual adapter over frozen features.

    $$h' = h + \sigma \odot W_2 \, \mathrm{GELU}(W_1 \, (h - \mu) / \sigma)$$

    with mean and deviation of each feature over the training instances. W_2 starts at zero, so that h' = h: the start
    is the frozen features themselves.

    Args:
        feature_dim: Number D of features.
        config: Width, dropout, and how views are made.
    """

    def __init__(self, feature_dim: int, config: AdapterConfig) -> None:
        nn.Module.__init__(self)  # there is no backbone
        self.feature_dim = feature_dim
        self.config = config
        self.hidden = nn.Linear(feature_dim, config.hidden_dim)
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(config.hidden_dim, feature_dim)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)
        self.register_buffer("mean", torch.zeros(feature_dim))
        self.register_buffer("std", torch.ones(feature_dim))

    def forward(self, images: Tensor) -> Tensor:
        """Adapted features (B, D) of features (B, D)."""
        hidden = self.dropout(nn.functional.gelu(self.hidden(self.standardised(images))))
        adapted: Tensor = images + self.std * self.output(hidden)
        return adapted

    @property
    def projected_dim(self) -> int:
        """All features."""
        return self.feature_dim

    def standardised(self, features: Tensor) -> Tensor:
        """Features (B, D) at mean 0 and deviation 1 over the training instances; what the projection head sees."""
        return (features - self.mean) / self.std

    def learn_statistics(self, features: Tensor) -> None:
        """Take mean and deviation from training features (N, D), in double precision and part by part.

        Raises:
            InputError: They have another dimension.
        """
        if features.dim() != 2 or features.shape[1] != self.feature_dim:
            raise InputError(f"expected features of shape (N, {self.feature_dim}), got {tuple(features.shape)}")
        parts = torch.split(features, ROWS_AT_ONCE)
        total, squares = torch.zeros(2, self.feature_dim)
        for part in parts:
            total = total + part.double().sum(0).cpu()
            give_back()
        mean = total / len(features)
        for part in parts:
            squares = squares + ((part.double().cpu() - mean) ** 2).sum(0)
            give_back()
        std = (squares / len(features)).sqrt()
        self.mean.copy_(mean)
        self.std.copy_(torch.where(std > _SMALLEST_DEVIATION, std, 1.0))  # a feature that never changes


class FeatureViews:
    """Random views of features: noise of a share of each feature's deviation, and some features set to their mean.

    Args:
        adapter: Carries the settings and statistics.
        device: Device of the features.
        keys: What the random draws are derived from.
    """

    def __init__(self, adapter: FeatureAdapter, device: torch.device, *keys: int | str) -> None:
        self._adapter = adapter
        self.generator = torch.Generator(device)
        self.reseed(*keys)

    def reseed(self, *keys: int | str) -> None:
        """Derive the next draws from other keys."""
        self.generator.manual_seed(derive_seed("views", *keys))

    def pair(self, features: Tensor, rows: Tensor) -> Tensor:
        """Two views of each of some instances, (2B, D), first views first.

        Args:
            features: (N, D).
            rows: (B,) which of them, on the same device.
        """
        config, adapter = self._adapter.config, self._adapter
        chosen = features.index_select(0, rows).repeat(2, 1)
        noise = torch.randn(chosen.shape, generator=self.generator, device=chosen.device)
        dropped = torch.rand(chosen.shape, generator=self.generator, device=chosen.device) < config.feature_dropout
        return torch.where(dropped, adapter.mean, chosen + config.feature_noise * adapter.std * noise)


def adapter_encoder(config: RunConfig) -> EncoderConfig:
    """The run's encoder with all that is needed to build it: of a cohort of features with the adapter's settings."""
    if config.encoder.name != FEATURES:
        return config.encoder
    options = {**config.encoder.options, **config.adapter.model_dump(mode="json")}
    return config.encoder.model_copy(update={"options": options})


def create_adapter(options: Mapping[str, Any]) -> FeatureAdapter:
    """Make an adapter from the options of its encoder section: `feature_dim` and those of `AdapterConfig`.

    Raises:
        InputError: There is no cohort of features behind it, or an option is wrong.
    """
    given = dict(options)
    feature_dim = given.pop("feature_dim", None)
    if not isinstance(feature_dim, int) or feature_dim < 1:
        raise InputError(f"encoder.name={FEATURES} is for cohorts of features (`its2clr cohort features` makes one)")
    try:
        return FeatureAdapter(feature_dim, AdapterConfig(**given))
    except ValidationError as error:
        raise InputError(f"encoder {FEATURES!r}: {error.errors()[0]['msg']}") from error

"""The feature extractor f and the projection head psi."""

from typing import Any

import torch
from torch import Tensor, nn

from its2clr.config import FEATURES, EncoderConfig, ProjectorConfig
from its2clr.encoders.norms import fuse_norms
from its2clr.errors import InputError
from its2clr.views.plain import to_float
from its2clr.wording import did_you_mean

FOREIGN_WEIGHTS = ("checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
"""Options of timm that fetch weights or read them from other files, by some of its versions with pickle."""


class SideBySide(nn.Module):
    """Two networks of one kind; features of the start first, then those of the refined one.

    Args:
        start: The network that refinement began with.
        refined: The refined one.
    """

    def __init__(self, start: nn.Module, refined: nn.Module) -> None:
        super().__init__()
        self.start, self.refined = start, refined
        self.num_features = feature_count(start) + feature_count(refined)

    def forward(self, images: Tensor) -> Tensor:
        """Features (B, 2D) of normalised tiles."""
        return torch.cat([self.start(images), self.refined(images)], dim=1)


def feature_count(backbone: nn.Module) -> int:
    """Number of features of a network; some widen their features after pooling, and timm then says so."""
    return int(getattr(backbone, "head_hidden_size", None) or backbone.num_features)  # type: ignore[arg-type]


class Encoder(nn.Module):
    """A timm backbone that carries its normalisation constants.

    Args:
        backbone: Maps normalised tiles (B, 3, H, W) to pooled features (B, D).
        mean: Channel means in [0, 1].
        std: Channel deviations in [0, 1].

    Attributes:
        frozen: Parts that stay in evaluation mode.
    """

    mean: Tensor
    std: Tensor
    frozen: tuple[nn.Module, ...] = ()

    def __init__(self, backbone: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.backbone = backbone
        self.feature_dim = feature_count(backbone)
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Features (B, D) of tiles (B, 3, H, W), uint8 or float in [0, 1]."""
        normalised = (to_float(images) - self.mean) / self.std
        features: Tensor = self.backbone(normalised.contiguous(memory_format=torch.channels_last))
        return features

    def train(self, mode: bool = True) -> "Encoder":
        """Set training or evaluation mode; what is frozen stays in evaluation mode."""
        super().train(mode)
        for module in self.frozen:
            module.eval()
        return self

    @property
    def projected_dim(self) -> int:
        """How many of the features the projection head sees."""
        backbone = self.backbone
        return feature_count(backbone.refined) if isinstance(backbone, SideBySide) else self.feature_dim

    def standardised(self, features: Tensor) -> Tensor:
        """Features as the projection head sees them: as they are; of two networks those of the refined one."""
        return features[:, -self.projected_dim :]

    def parted(self) -> "tuple[Encoder, Encoder]":
        """Start and refined network of an encoder that has both."""
        assert isinstance(self.backbone, SideBySide)
        return self._around(self.backbone.start), self._around(self.backbone.refined)

    def beside(self, start: "Encoder") -> "Encoder":
        """An encoder with the features of `start` and of this one side by side."""
        return self._around(SideBySide(start.backbone, self.backbone))

    def _around(self, backbone: nn.Module) -> "Encoder":
        return Encoder(backbone, tuple(self.mean.flatten().tolist()), tuple(self.std.flatten().tolist()))


class EmbeddingNetwork(nn.Module):
    """f and psi in one forward pass, so that one call is one distributed synchronisation.

    Args:
        encoder: f.
        head: psi; takes features (B, D).
    """

    def __init__(self, encoder: Encoder, head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features (B, D) and embeddings (B, D')."""
        features = self.encoder(images)
        return features, self.head(self.encoder.standardised(features))


def create_encoder(name: str | EncoderConfig, **options: Any) -> Encoder:
    """Make an encoder by timm name (`create_encoder("resnet18")`) or from its section of the config.

    Raises:
        InputError: The name is not timm's (the closest is named), or the options are refused.
    """
    import timm

    config = EncoderConfig(name=name, options=options) if isinstance(name, str) else name
    if config.name == FEATURES:
        from its2clr.encoders.adapter import create_adapter

        return create_adapter(config.options)
    if named := [option for option in FOREIGN_WEIGHTS if option in config.options]:
        raise InputError(f"encoder.options.{named[0]}: give weights as encoder.weights, of which only tensors are read")
    if not timm.is_model(config.name):
        hint = did_you_mean(config.name, timm.list_models())
        raise InputError(f"encoder.name: timm has no model {config.name!r}{hint}")
    arguments = dict(config.options)
    if config.norm == "instance":
        arguments["norm_layer"] = nn.InstanceNorm2d
    try:
        backbones = [
            timm.create_model(config.name, pretrained=config.pretrained, num_classes=0, **arguments)
            for _ in range(2 if config.side_by_side else 1)
        ]
        if config.norm == "instance":
            for part in backbones:
                fuse_norms(part)
        backbone = SideBySide(*backbones) if config.side_by_side else backbones[0]
        return Encoder(backbone.to(memory_format=torch.channels_last), config.mean, config.std)
    except Exception as error:  # timm and its networks refuse options with all kinds of errors
        words = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"encoder {config.name!r} with options {config.options}: {words}") from error


def check_tile_size(encoder: Encoder, tile_size: int, *, crops: bool = False) -> None:
    """Try the encoder on blank tiles, in training mode as pretraining will.

    Args:
        encoder: The encoder.
        tile_size: Pixels of the tiles.
        crops: Whether these are small crops, which it must take besides the tiles.

    Raises:
        InputError: It cannot take tiles of this size, or gives no pooled features.
    """
    was_training = encoder.training
    state = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    try:
        with torch.no_grad():
            features = encoder.train()(torch.zeros(2, 3, tile_size, tile_size))
    except Exception as error:
        what, said = "crops" if crops else "tiles", _misfit(encoder.backbone, tile_size, error, crops=crops)
        raise InputError(f"the encoder cannot take {what} of {tile_size} x {tile_size} pixels: {said}") from error
    finally:
        encoder.load_state_dict(state)
        encoder.train(was_training)
    if features.shape != (2, encoder.feature_dim):
        raise InputError(
            f"the encoder gives {tuple(features.shape)} for two tiles instead of one feature vector of "
            f"{encoder.feature_dim} numbers each; choose another encoder, or its pooling (encoder.options.global_pool)"
        )


def image_size(backbone: nn.Module) -> tuple[int, int] | None:
    """Pixels of the images that a network with patches, such as a ViT, is built for; None of others."""
    size = getattr(getattr(backbone, "patch_embed", None), "img_size", None)
    return None if size is None else (int(size[0]), int(size[1]))


def _misfit(backbone: nn.Module, tile_size: int, error: Exception, *, crops: bool) -> str:
    """Why a network does not take tiles of a size, and what to do."""
    built, strict = image_size(backbone), getattr(getattr(backbone, "patch_embed", None), "strict_img_size", False)
    if built is None or built == (tile_size, tile_size) or not strict:
        advice = "Pack larger tiles (--tile-size), or choose another encoder or its options"
        return f"{str(error).rstrip('.')}. {advice}"
    several = "encoder.options.dynamic_img_size=true"
    advice = several if crops else f"encoder.options.img_size={tile_size}, or {several}"
    return (
        f"it is built for {built[0]} x {built[1]}. Set {advice}; the position embeddings of encoder.weights are then "
        "resampled. pretrain.start takes an encoder as it is: give its file as encoder.weights instead"
    )


def create_projector(feature_dim: int, config: ProjectorConfig) -> nn.Module:
    """The projection head; its output is l2-normalised by the loss."""
    hidden: list[nn.Module] = [nn.Linear(feature_dim, config.hidden_dim)]
    if config.norm == "batch":
        hidden.append(nn.BatchNorm1d(config.hidden_dim))
    return nn.Sequential(*hidden, nn.ReLU(), nn.Linear(config.hidden_dim, config.output_dim))

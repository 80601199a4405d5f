"""An encoder as a folder in timm's hub layout: `model.safetensors` and `config.json`."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from its2clr.config import EncoderConfig
from its2clr.encoders.encoder import Encoder
from its2clr.encoders.weights import without_foreign_weights
from its2clr.engine.files import write_json
from its2clr.errors import InputError

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_KEPT = ("first_conv", "classifier", "pool_size", "fixed_input_size")


def write_timm_folder(folder: Path, encoder: Encoder, config: EncoderConfig, tile_size: int) -> dict[str, Any]:
    """Write weights and config, and make sure that timm alone rebuilds the same network from them.

    Args:
        folder: Where to write.
        encoder: The network.
        config: How it was built.
        tile_size: Pixels of the tiles it was trained on.

    Returns:
        The content of `config.json`.

    Raises:
        InputError: timm builds another network from the config.
    """
    document = timm_config(encoder, config, tile_size)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in encoder.backbone.state_dict().items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / CONFIG, document)
    _check(folder, document, config, tensors)
    return document


def timm_config(encoder: Encoder, config: EncoderConfig, tile_size: int) -> dict[str, Any]:
    """What timm's `config.json` says: architecture, its arguments, and how tiles are normalised."""
    backbone = encoder.backbone
    known: dict[str, Any] = dict(backbone.pretrained_cfg)  # type: ignore[arg-type]
    arguments = dict(without_foreign_weights(config).options)
    fixed = getattr(getattr(backbone, "patch_embed", None), "img_size", None)
    if fixed is not None:  # a ViT is as large as its position embeddings, whatever tiles it sees
        arguments["img_size"] = [int(side) for side in fixed]
    preset = {
        "mean": _shortest(encoder.mean),
        "std": _shortest(encoder.std),
        "input_size": [3, tile_size, tile_size],
        "num_classes": 0,
        "crop_pct": 1.0,
        "crop_mode": "center",
        "interpolation": "bilinear",
        **{key: known[key] for key in _KEPT if key in known},
    }
    return {
        "architecture": str(known.get("architecture") or config.name.partition(".")[0]),
        "num_classes": 0,
        "num_features": encoder.feature_dim,
        "model_args": arguments,
        "pretrained_cfg": preset,
    }


def needed_in_code(config: EncoderConfig) -> str:
    """What timm must be told in Python since no config can say it: the end of an argument list."""
    return ", norm_layer=torch.nn.InstanceNorm2d" if config.norm == "instance" else ""


def _shortest(constants: torch.Tensor) -> list[float]:
    """The shortest decimals that are these 32-bit numbers: 0.485, not 0.48500001."""
    return [float(str(np.float32(value))) for value in constants.flatten().tolist()]


def _check(folder: Path, document: dict[str, Any], config: EncoderConfig, tensors: dict[str, torch.Tensor]) -> None:
    import timm

    arguments = dict(document["model_args"])
    if config.norm == "instance":
        arguments["norm_layer"] = nn.InstanceNorm2d
    try:
        rebuilt = timm.create_model(
            document["architecture"],
            num_classes=0,
            checkpoint_path=str(folder / WEIGHTS),
            **arguments,
        ).state_dict()
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"timm alone does not rebuild this encoder, so it is not exported: {error}") from error
    if rebuilt.keys() != tensors.keys() or not all(torch.equal(rebuilt[name], tensors[name]) for name in tensors):
        raise InputError("timm alone rebuilds another network from these weights, so it is not exported")

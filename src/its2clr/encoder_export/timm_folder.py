"""An encoder as a folder in timm's hub layout: `model.safetensors` and `config.json`."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from its2clr.config import EncoderConfig
from its2clr.encoders.encoder import Encoder
from its2clr.encoders.weights import without_foreign_weights
from its2clr.errors import InputError
from its2clr.files import write_json
from its2clr.units import TilePixels

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_REFUSED = (RuntimeError, TypeError, ValueError, KeyError, AttributeError, AssertionError, OSError)
_KEPT = ("first_conv", "classifier", "pool_size", "fixed_input_size")


class TimmFolder(NamedTuple):
    """What was written.

    Attributes:
        config: The content of `config.json`.
        by_name: Whether `timm.create_model("local-dir:FOLDER", pretrained=True)` gives the network. Some architectures
            (Swin) take weights without a classifier for old ones and rename them; older versions know no such names.
    """

    config: dict[str, Any]
    by_name: bool


def write_timm_folder(folder: Path, encoder: Encoder, config: EncoderConfig, tile_size: TilePixels) -> TimmFolder:
    """Write weights and config, and make sure that timm alone rebuilds the same network from them.

    Args:
        folder: Where to write.
        encoder: The network.
        config: How it was built.
        tile_size: Pixels of the tiles it was trained on.

    Raises:
        InputError: timm builds another network from the config.
    """
    document = timm_config(encoder, config, tile_size)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in encoder.backbone.state_dict().items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / CONFIG, document)
    in_code = {"norm_layer": nn.InstanceNorm2d} if config.norm == "instance" else {}
    arguments = {**document["model_args"], **in_code, "num_classes": 0, "checkpoint_path": str(folder / WEIGHTS)}
    try:
        same = _gives(tensors, document["architecture"], arguments)
    except _REFUSED as error:
        raise InputError(f"timm alone does not rebuild this encoder, so it is not exported: {error}") from error
    if not same:
        raise InputError("timm alone rebuilds another network from these weights, so it is not exported")
    try:
        by_name = _gives(tensors, f"local-dir:{folder}", {"pretrained": True, **in_code})
    except _REFUSED:
        by_name = False
    return TimmFolder(document, by_name)


def timm_config(encoder: Encoder, config: EncoderConfig, tile_size: TilePixels) -> dict[str, Any]:
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


def _gives(tensors: dict[str, torch.Tensor], name: str, arguments: dict[str, Any]) -> bool:
    """Whether timm makes a network of these tensors."""
    import timm

    made = timm.create_model(name, **arguments).state_dict()
    return made.keys() == tensors.keys() and all(torch.equal(made[key], tensors[key]) for key in tensors)

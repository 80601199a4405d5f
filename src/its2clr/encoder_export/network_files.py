"""An encoder as files that other software loads: a folder in timm's hub layout, or one ONNX file.

```
model.safetensors, config.json    what timm loads
encoder.onnx                      uint8 RGB tiles in, features out; normalisation is inside
```
"""

import copy
import logging
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from its2clr.config import EncoderConfig
from its2clr.encoders.encoder import Encoder
from its2clr.encoders.weights import without_foreign_weights
from its2clr.errors import InputError
from its2clr.files import write_json
from its2clr.units import TilePixels

WEIGHTS, CONFIG = "model.safetensors", "config.json"
ONNX = "encoder.onnx"
INPUT, OUTPUT = "tiles", "features"
_LARGEST_FILE = 1_800_000_000
"""Bytes of weights above which they go into a second file, since an ONNX file holds at most two GB."""
_REFUSED = (RuntimeError, TypeError, ValueError, KeyError, AttributeError, AssertionError, OSError)
_KEPT = ("first_conv", "classifier", "pool_size", "fixed_input_size")


class TimmFolder(NamedTuple):
    """What was written.

    Attributes:
        config: The content of `config.json`.
        by_name: Whether `timm.create_model("local-dir:FOLDER", pretrained=True)` gives the network. Older versions of
            timm cannot do this at all. Swin cannot either: it takes weights without a classifier for an old file, and
            renames them.
    """

    config: dict[str, Any]
    by_name: bool


def write_timm_folder(folder: Path, encoder: Encoder, config: EncoderConfig, tile_size: TilePixels) -> TimmFolder:
    """Write weights and config, and check that timm alone rebuilds the same network from them.

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
        raise InputError(f"timm cannot rebuild this encoder from its files, so it is not exported: {error}") from error
    if not same:
        raise InputError("timm rebuilds another network from the files of this encoder, so it is not exported")
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
    """Further arguments of `timm.create_model` that `config.json` cannot hold, as Python code."""
    return ", norm_layer=torch.nn.InstanceNorm2d" if config.norm == "instance" else ""


def require_onnx() -> None:
    """Check that the libraries for ONNX are installed.

    Raises:
        InputError: One of them is missing.
    """
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise InputError(f"ONNX needs {' and '.join(missing)}, not installed here: pip install 'its2clr[onnx]'")


def write_onnx(path: Path, encoder: Encoder, tile_size: TilePixels) -> None:
    """Write an encoder as ONNX, for batches of any size of tiles of one size.

    Args:
        path: The file; very large weights go to `encoder.onnx.data` beside it.
        encoder: The network.
        tile_size: Pixels of the tiles.

    Raises:
        InputError: The libraries are missing, or this architecture cannot be exported.
    """
    require_onnx()
    network = _Normalised(encoder).cpu().eval()
    size = sum(tensor.numel() * tensor.element_size() for tensor in network.state_dict().values())
    example = torch.zeros(2, 3, tile_size, tile_size, dtype=torch.uint8)
    logging.getLogger("onnxscript").setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                network,
                (example,),
                str(path),
                input_names=[INPUT],
                output_names=[OUTPUT],
                dynamic_shapes={"tiles": {0: torch.export.Dim("batch")}},
                dynamo=True,
                external_data=size > _LARGEST_FILE,
                verbose=False,
            )
    except RuntimeError as error:  # the exporter raises no other kind
        raise InputError(f"PyTorch cannot write this encoder as ONNX: {error}") from error


class _Normalised(nn.Module):
    """Tiles (B, 3, H, W) uint8 -> features (B, D)."""

    mean: Tensor
    std: Tensor

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.backbone = copy.deepcopy(encoder.backbone).to(memory_format=torch.contiguous_format)
        self.register_buffer("mean", encoder.mean.clone())
        self.register_buffer("std", encoder.std.clone())

    def forward(self, tiles: Tensor) -> Tensor:
        features: Tensor = self.backbone((tiles.float() / 255 - self.mean) / self.std)
        return features


def _shortest(constants: Tensor) -> list[float]:
    """These 32-bit numbers in the fewest decimals: 0.485, not 0.48500001."""
    return [float(str(np.float32(value))) for value in constants.flatten().tolist()]


def _gives(tensors: dict[str, Tensor], name: str, arguments: dict[str, Any]) -> bool:
    """Whether timm makes a network with these tensors."""
    import timm

    made = timm.create_model(name, **arguments).state_dict()
    return made.keys() == tensors.keys() and all(torch.equal(made[key], tensors[key]) for key in tensors)

"""An encoder as one ONNX file: uint8 RGB tiles in, features out; normalisation is inside."""

import copy
import logging
import warnings
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from its2clr.encoders.encoder import Encoder
from its2clr.errors import InputError
from its2clr.units import TilePixels

ONNX = "encoder.onnx"
INPUT, OUTPUT = "tiles", "features"
_LARGEST_FILE = 1_800_000_000
"""Bytes of weights above which they go into a second file: a file of the format holds two GB."""


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


def require_onnx() -> None:
    """Refuse to begin without the libraries.

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
    except RuntimeError as error:  # errors of the exporter are of this kind
        raise InputError(f"PyTorch cannot write this encoder as ONNX: {error}") from error

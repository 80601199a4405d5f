"""Features of every tile, without randomness; processes share out the work."""

import torch
from torch import Tensor

from its2clr.encoders.encoder import Encoder
from its2clr.engine.devices import Engine
from its2clr.engine.tiles import TileStore


def extract_features(encoder: Encoder, tiles: TileStore, engine: Engine, batch_size: int = 512) -> Tensor:
    """Features h = f(x) of every tile, in order.

    Args:
        encoder: f; left in the mode it came in.
        tiles: Decoded tiles.
        engine: With several processes each computes every n-th batch and all get the whole.
        batch_size: Tiles per forward pass.

    Returns:
        (N, D) float32 on the engine's device.
    """
    was_training = encoder.training
    encoder.eval()
    features = torch.zeros(len(tiles), encoder.feature_dim, device=engine.device)
    starts = range(0, len(tiles), batch_size)
    with torch.no_grad(), engine.progress("extract", len(starts), unit="batches") as progress:
        for number, start in enumerate(starts):
            if number % engine.world_size == engine.rank:
                rows = torch.arange(start, min(start + batch_size, len(tiles)))
                with engine.autocast():
                    features[rows] = encoder(tiles.gather(rows, engine.device)).float()
            progress.advance()
    encoder.train(was_training)
    return engine.sum_over_processes(features)

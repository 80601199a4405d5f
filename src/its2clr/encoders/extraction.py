"""Features of every tile, without randomness; processes share out the work."""

import math

import torch
from torch import Tensor

from its2clr.encoders.encoder import Encoder
from its2clr.engine.devices import Engine
from its2clr.engine.memory import memory_advice
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
    batches = extraction_batches(len(tiles), batch_size, engine)
    feed = tiles.feed(batches.shape[1], engine.device)
    with (
        memory_advice("extract"),
        torch.no_grad(),
        engine.progress("extract", len(batches), unit="batches") as progress,
    ):
        for indices, rows in zip(batches, feed(batches), strict=True):
            with engine.autocast():
                features[indices] = encoder(feed.tiles.index_select(0, rows)).float()
            progress.advance()
    encoder.train(was_training)
    return engine.sum_over_processes(features)


def extraction_batches(count: int, batch_size: int, engine: Engine) -> Tensor:
    """This process's batches of all tiles, (steps, B) on the device; the last tile fills up the last of them."""
    batch_size = min(batch_size, max(count, 1))
    steps = math.ceil(count / batch_size)
    rows = torch.arange(steps * batch_size, device=engine.device).clamp(max=count - 1).view(steps, batch_size)
    return rows[engine.rank :: engine.world_size]

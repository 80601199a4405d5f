"""Features of every tile, without randomness; processes share out the work.

Every forward pass of a machine has the same shape, a short one being filled up: libraries choose their kernels by
shape, and the last bits of a result depend on the kernel. So a tile has the same features alone and among others, which
is what makes a prediction for one new slide equal the one it gets within a cohort.
"""

import math
from contextlib import nullcontext

import torch
from torch import Tensor

from its2clr.bag_features import BagFeatures
from its2clr.bags import Bags
from its2clr.encoders.encoder import Encoder
from its2clr.engine.devices import Engine
from its2clr.engine.memory import memory_advice
from its2clr.engine.progress import Progress
from its2clr.tile_store import TileStore, room_for_features

PIXELS_PER_PASS_ON_CPU = 2**17
"""A CPU gains nothing from larger passes, and a bag of a few tiles need not be filled up to hundreds."""
SMALLEST_PASS = 16


def extract_bags(encoder: Encoder, bags: Bags, engine: Engine) -> BagFeatures:
    """Lines 3 to 6 of Algorithm 1: represent every instance and group the representations into labelled bags."""
    flat = extract_features(encoder, bags.tiles, engine, engine.extract_batch_size)
    return BagFeatures(flat, torch.from_numpy(bags.offsets), torch.from_numpy(bags.labels), bags.groups)


def extract_features(
    encoder: Encoder, tiles: TileStore, engine: Engine, batch_size: int = 512, progress: Progress | None = None
) -> Tensor:
    """Features h = f(x) of every tile, in order.

    Args:
        encoder: f; left in the mode it came in.
        tiles: Decoded tiles.
        engine: With several processes each computes every n-th batch and all get the whole.
        batch_size: Tiles per forward pass; on a CPU large tiles go in smaller passes.
        progress: A display of a larger job, to be advanced by the tiles done; one of its own is shown if None.

    Returns:
        (N, D) float32 on the engine's device.
    """
    was_training = encoder.training
    encoder.eval()
    features = room_for_features(len(tiles), encoder.feature_dim, engine, tiles.folder)
    batches = extraction_batches(len(tiles), pass_size(batch_size, tiles.side, engine.device), engine)
    feed = tiles.feed(batches.shape[1], engine.device)
    with (
        memory_advice("extract"),
        torch.no_grad(),
        engine.progress("extract", len(tiles), "tiles") if progress is None else nullcontext(progress) as shown,
    ):
        left = len(tiles)
        for indices, rows in zip(batches, feed(batches), strict=True):
            with engine.autocast():
                features[indices] = encoder(feed.tiles.index_select(0, rows)).float()
            done = min(left, len(indices) * engine.world_size)  # the other processes are about as far
            shown.advance(done)
            left -= done
    encoder.train(was_training)
    return engine.sum_over_processes(features)


def pass_size(batch_size: int, side: int, device: torch.device) -> int:
    """Tiles of one forward pass: by settings, tile and kind of device, never by how many there are."""
    if device.type != "cpu":
        return batch_size
    fitting = PIXELS_PER_PASS_ON_CPU // side**2
    return min(batch_size, max(SMALLEST_PASS, 1 << max(fitting.bit_length() - 1, 0)))


def extraction_batches(count: int, batch_size: int, engine: Engine) -> Tensor:
    """This process's batches of all tiles, (steps, B) on the device; the last tile fills up the last of them."""
    steps = math.ceil(count / batch_size)
    rows = torch.arange(steps * batch_size, device=engine.device).clamp(max=count - 1).view(steps, batch_size)
    return rows[engine.rank :: engine.world_size]

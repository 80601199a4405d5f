"""One epoch of contrastive training over batches of indices: views, forward pass, objective, step."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from its2clr.config import OptimiserConfig, ViewsConfig
from its2clr.engine.devices import Engine
from its2clr.engine.guard import embedding_spread
from its2clr.engine.tiles import TileStore
from its2clr.errors import TrainingError
from its2clr.views import ViewMaker

Objective = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
"""Head outputs (2B, D') of both views, first views first; labels (2B,); anchors (2B,) bool -> scalar loss."""


@dataclass(frozen=True)
class Batches:
    """What an epoch trains on: rows of the tile store, step by step.

    Attributes:
        indices: (steps, B) rows of the tile store.
        labels: (steps, B) pseudo labels, or None where the objective needs none.
        anchors: (steps, B) whether a row is an anchor, or None.
    """

    indices: Tensor
    labels: Tensor | None = None
    anchors: Tensor | None = None


@dataclass(frozen=True)
class EpochResult:
    """What an epoch found."""

    loss: float
    spread: float
    tiles_per_second: float
    seconds: float


def train_epoch(
    network: nn.Module,
    optimiser: torch.optim.Optimizer,
    tiles: TileStore,
    batches: Batches,
    objective: Objective,
    views: ViewsConfig,
    engine: Engine,
    learning_rates: list[float],
    keys: tuple[int | str, ...],
) -> EpochResult:
    """Train one epoch; every process takes its share of each batch.

    Args:
        network: Set-up `EmbeddingNetwork`.
        optimiser: Its optimiser.
        tiles: Decoded tiles.
        batches: Rows, pseudo labels and anchors of every step.
        objective: The loss; gathers over processes itself.
        views: How views are made.
        engine: Device and processes.
        learning_rates: One per step.
        keys: Seed, stage and epoch: what the random views are derived from.

    Raises:
        TrainingError: The loss is not a number.
    """
    with engine.own_random_state(*keys, "network", engine.rank):  # dropout and drop-path of the backbone
        losses, spread, seconds = _run_steps(
            network,
            optimiser,
            tiles,
            batches,
            objective,
            ViewMaker(views, engine.device, *keys, engine.rank),
            engine,
            learning_rates,
            f"{keys[1]} {keys[2]}",
        )
    engine.share_buffers(network)
    mean_loss, mean_spread = engine.mean_over_processes(losses.mean(), spread)
    if not math.isfinite(mean_loss):
        raise TrainingError(
            f"{keys[1]}: the loss became {mean_loss} in epoch {keys[2]}. Lower {keys[1]}.learning_rate or raise "
            f"{keys[1]}.temperature; with bf16, try engine.precision=32-true. Start a new run directory with the new "
            "settings."
        )
    return EpochResult(mean_loss, mean_spread, batches.indices.numel() / seconds, seconds)


def _run_steps(
    network: nn.Module,
    optimiser: torch.optim.Optimizer,
    tiles: TileStore,
    batches: Batches,
    objective: Objective,
    make_views: ViewMaker,
    engine: Engine,
    learning_rates: list[float],
    name: str,
) -> tuple[Tensor, float, float]:
    """Losses of every step, spread of the last batch's embeddings, and seconds taken."""
    mine = slice(engine.rank, None, engine.world_size)
    losses: list[Tensor] = []
    network.train()
    started = time.perf_counter()
    embeddings = torch.zeros(1, 1)
    with engine.progress(name, len(batches.indices)) as progress:
        for step, rows in enumerate(batches.indices):
            for group in optimiser.param_groups:
                group["lr"] = learning_rates[step]
            images = tiles.gather(rows[mine], engine.device)
            _, embeddings = network(torch.cat([make_views(images), make_views(images)]))
            loss = objective(
                embeddings.float(),
                _both_views(batches.labels, step, mine, engine.device),
                _both_views(batches.anchors, step, mine, engine.device),
            )
            optimiser.zero_grad()
            engine.backward(loss)
            optimiser.step()
            losses.append(loss.detach())
            progress.advance()
    found = torch.stack(losses), embedding_spread(embeddings.detach())
    return *found, time.perf_counter() - started


def cosine_or_constant(config: OptimiserConfig, epoch: int, epochs: int, steps: int) -> list[float]:
    """Learning rate of every step of an epoch (counted from 0); the cosine falls to zero after the last step."""
    if config.schedule == "constant":
        return [config.learning_rate] * steps
    return [
        config.learning_rate * 0.5 * (1 + math.cos(math.pi * (epoch * steps + step) / (epochs * steps)))
        for step in range(steps)
    ]


def make_optimiser(network: nn.Module, config: OptimiserConfig) -> torch.optim.Optimizer:
    """Plain SGD as in the paper; the loop sets its learning rate."""
    return torch.optim.SGD(
        network.parameters(),
        lr=config.learning_rate,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )


def _both_views(values: Tensor | None, step: int, mine: slice, device: torch.device) -> Tensor | None:
    return None if values is None else values[step, mine].to(device, non_blocking=True).repeat(2)

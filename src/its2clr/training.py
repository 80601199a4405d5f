"""Contrastive training over batches of indices: one step (views, forward pass, loss, optimiser), and one epoch of them.

On a GPU a step is recorded once as a CUDA graph; a replay launches its thousand kernels at once, and nothing in an
epoch waits for the device. Long trainings compile the network first.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from its2clr.config import OptimiserConfig, PretrainConfig, RefineConfig
from its2clr.encoders.adapter import FeatureAdapter, FeatureViews
from its2clr.engine.devices import Engine
from its2clr.engine.graphs import Recorded
from its2clr.engine.guard import embedding_spread
from its2clr.engine.progress import TotalWork
from its2clr.errors import TrainingError
from its2clr.tile_store import TileStore
from its2clr.views.maker import ViewMaker

Objective = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
"""Head outputs (2B, D') of both views, first views first; labels (2B,); anchors (2B,) bool -> scalar loss."""


@dataclass(frozen=True)
class Batches:
    """What an epoch trains on: rows of the tile store, step by step.

    Attributes:
        indices: (steps, B) rows of the tile store.
        labels: (steps, B) pseudo labels, or None if the objective needs none.
        anchors: (steps, B) whether a row is an anchor, or None.
    """

    indices: Tensor
    labels: Tensor | None = None
    anchors: Tensor | None = None

    def share(self, engine: Engine) -> "Batches":
        """This process's part of every step, on its device."""
        mine = slice(engine.rank, None, engine.world_size)
        parts = (self.indices, self.labels, self.anchors)
        return Batches(*(None if part is None else part[:, mine].contiguous().to(engine.device) for part in parts))  # type: ignore[arg-type]


@dataclass(frozen=True)
class LocalCrops:
    """Views of small parts of the tiles; the network gets them as a second argument.

    Attributes:
        count: Number of crops of each tile.
        scale: Smallest and largest area of a crop, as a share of the tile's area.
        size: Side of a crop in pixels; None: the side of the tile.
    """

    count: int
    scale: tuple[float, float]
    size: int | None


@dataclass(frozen=True)
class EpochResult:
    """Loss, spread and speed of an epoch."""

    loss: float
    spread: float
    tiles_per_second: float
    seconds: float


class TrainingStep:
    """One step of a stage; made once, so that every epoch uses the same compiled network and recording.

    Args:
        network: f and a head; set up here, trained in place.
        tiles: Decoded tiles.
        objective: The loss; gathers over processes itself.
        config: Optimiser and views.
        batch_size: Tiles per step, over all processes.
        steps: Number of steps of the whole training.
        engine: Device and processes.
        crops: More views of each tile; None: the two views only.
        records: Whether the step may be recorded and the network compiled. This requires that they neither look at
            values nor move what they keep.
        edit_gradients: Called in every step before the optimiser uses the gradients; None: they are used as they are.

    Attributes:
        network: The network as it was set up.
        optimiser: Plain SGD as in the paper, or AdamW.
        views: Makes the views.
        replays: Whether steps are recorded and replayed.
    """

    def __init__(
        self,
        network: nn.Module,
        tiles: TileStore,
        objective: Objective,
        config: PretrainConfig | RefineConfig,
        batch_size: int,
        steps: int,
        engine: Engine,
        *,
        crops: LocalCrops | None = None,
        records: bool = True,
        edit_gradients: Callable[[], None] | None = None,
    ) -> None:
        if records and engine.compiles(2 * steps * batch_size * tiles.side**2):
            network.compile(dynamic=False)
        network.to(engine.device)
        self.network, self.optimiser = engine.set_up(network, make_optimiser(network, config, engine))
        self.engine = engine
        adapter = getattr(network, "encoder", None)
        self.views: ViewMaker | FeatureViews = (
            FeatureViews(adapter, engine.device)
            if isinstance(adapter, FeatureAdapter)
            else ViewMaker(config.views, engine.device, fused=engine.records_steps)
        )
        self._objective = objective
        self._feed = tiles.feed(batch_size // engine.world_size, engine.device)
        self._crops, self._edit_gradients = crops, edit_gradients
        self._clip: float | None = None
        self._decayed: list[nn.Parameter] = []
        if isinstance(config, PretrainConfig):
            self._clip, self._decayed = config.gradient_clip, weights_that_decay(network, config)
        self._decay = torch.zeros((), device=engine.device)  # a recorded step reads it anew in every replay
        self.replays = records and engine.records_steps and engine.world_size == 1
        self._recorded = Recorded(self._step, [self.views.generator])

    def batches(self, indices: Tensor) -> Iterator[Tensor]:
        """Bring the tiles of every step, (steps, B) rows of the store, to the device; yields the rows to call with."""
        return self._feed(indices)

    def __call__(
        self, rows: Tensor, labels: Tensor | None, anchors: Tensor | None, rate: float, decay: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Train on the tiles of a step; returns loss and embeddings, valid until the next step.

        `decay` is the weight decay of weights that decay apart from the optimiser.
        """
        if self._decayed:
            self._decay.fill_(rate * decay)
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return (self._recorded if self.replays else self._step)(rows, labels, anchors)

    def change(self, objective: Objective, momentum: float) -> None:
        """Continue with another loss and momentum; a recorded step is recorded anew."""
        self._objective = objective
        for group in self.optimiser.param_groups:
            group["momentum"] = momentum
        self._recorded = Recorded(self._step, [self.views.generator])

    def _step(self, rows: Tensor, labels: Tensor | None, anchors: Tensor | None) -> tuple[Tensor, Tensor]:
        views = [self.views.pair(self._feed.tiles, rows)]
        if self._crops is not None:
            assert isinstance(self.views, ViewMaker)  # features are not cropped
            crops = self._crops
            views.append(self.views.crops(self._feed.tiles, rows, crops.count, crops.scale, crops.size))
        _, embeddings = self.network(*views)
        loss = self._objective(embeddings.float(), _both_views(labels), _both_views(anchors))
        self.optimiser.zero_grad(set_to_none=True)
        self.engine.backward(loss)
        if self._clip is not None:
            for weight in self.network.parameters():  # each by itself, as in DINO's code
                clip_grad_norm_(weight, self._clip)
        if self._edit_gradients is not None:
            self._edit_gradients()
        if self._decayed:
            self._decay_weights()
        self.optimiser.step()
        return loss.detach(), embeddings.detach()

    @torch.no_grad()
    def _decay_weights(self) -> None:
        """As AdamW does: before its step, and only weights that have a gradient."""
        kept = 1 - self._decay
        for weight in self._decayed:
            if weight.grad is not None:
                weight.mul_(kept)


def train_epoch(
    step: TrainingStep,
    batches: Batches,
    learning_rates: list[float],
    keys: tuple[int | str, ...],
    after_step: Callable[[int], None] | None = None,
    spread_of: Callable[[Tensor], float] = embedding_spread,
    decays: list[float] | None = None,
) -> EpochResult:
    """Train one epoch; every process takes its share of each batch.

    Args:
        step: The step of this stage.
        batches: Rows, pseudo labels and anchors of every step.
        learning_rates: One per step.
        keys: Seed, stage and epoch; the random views are derived from them.
        after_step: Called after every step with its number in the epoch, from 0.
        spread_of: Measures how far the embeddings of the last step are spread.
        decays: Weight decay of every step; only used for weights that decay apart from the optimiser.

    Raises:
        TrainingError: The loss is not a number.
    """
    engine = step.engine
    mine = batches.share(engine)
    losses = torch.zeros(len(mine.indices), device=engine.device)
    embeddings = torch.zeros(1, 1)
    step.views.reseed(*keys, engine.rank)
    step.network.train()
    work, exact = engine.work, engine.device.type == "cpu"  # elsewhere steps are only queued until the epoch's end
    if work is not None:
        work.begin()
    started = time.perf_counter()
    with (
        engine.own_random_state(*keys, "network", engine.rank),  # dropout and drop-path of the backbone
        engine.progress(f"{keys[1]} {keys[2]}", len(losses)) as progress,
    ):
        for number, rows in enumerate(step.batches(mine.indices)):
            labels = None if mine.labels is None else mine.labels[number]
            anchors = None if mine.anchors is None else mine.anchors[number]
            decay = 0.0 if decays is None else decays[number]
            loss, embeddings = step(rows, labels, anchors, learning_rates[number], decay)
            losses[number] = loss
            if after_step is not None:
                after_step(number)
            if work is not None:
                work.add(batches.indices.shape[1])
                _measure(work, warm=number > 0, exact=exact)
                progress.note(work.said())
            progress.advance()
    spread = spread_of(embeddings)  # waits for the device, so the time below includes all its work
    seconds = time.perf_counter() - started
    if work is not None:
        work.measure(enough=0.0)
    engine.share_buffers(step.network)
    mean_loss, mean_spread = engine.mean_over_processes(losses.mean(), spread)
    if not math.isfinite(mean_loss):
        raise TrainingError(
            f"{keys[1]}: the loss became {mean_loss} in epoch {keys[2]}. Lower {keys[1]}.learning_rate or raise "
            f"{keys[1]}.temperature; with bf16, try engine.precision=32-true. New settings need a new run folder."
        )
    return EpochResult(mean_loss, mean_spread, batches.indices.numel() / seconds, seconds)


def _measure(work: TotalWork, *, warm: bool, exact: bool) -> None:
    """Measure after a step; the very first one, which makes everything ready, does not count."""
    if not (warm or work.is_measured):
        work.begin()
    elif exact:
        work.measure()


def cosine_or_constant(
    config: OptimiserConfig, epoch: int, epochs: int, steps: int, constant_epochs: int = 0
) -> list[float]:
    """Learning rate of every step of an epoch (counted from 0).

    The cosine reaches zero `epochs` after its start: with the last step, unless some constant epochs come before it.
    """
    after = epoch - constant_epochs
    if config.schedule == "constant" or after < 0:
        return [config.learning_rate] * steps
    return [config.learning_rate * left for left in _cosine(after, epochs, steps)]


def weight_decays(config: PretrainConfig, epoch: int, steps: int) -> list[float]:
    """Weight decay of every step of an epoch (counted from 0); it reaches its end after the last step."""
    start, end = config.weight_decay, config.weight_decay_end
    if end is None:
        return [start] * steps
    return [end + (start - end) * left for left in _cosine(epoch, config.epochs, steps)]


def _cosine(epoch: int, epochs: int, steps: int) -> list[float]:
    """Falls from one to zero along a cosine over all epochs; the values at the steps of one epoch."""
    return [0.5 * (1 + math.cos(math.pi * (epoch * steps + step) / (epochs * steps))) for step in range(steps)]


def warmed_up(rates: list[float], epoch: int, warmup_epochs: int) -> list[float]:
    """Learning rates of an epoch (counted from 0) with a linear rise from zero over the first epochs."""
    steps = len(rates)
    return [
        rate * min(1.0, (epoch * steps + step + 1) / max(warmup_epochs * steps, 1)) for step, rate in enumerate(rates)
    ]


def make_optimiser(network: nn.Module, config: OptimiserConfig, engine: Engine) -> torch.optim.Optimizer:
    """SGD as in the paper, or AdamW, for all weights that are not frozen.

    `TrainingStep` sets the learning rate; for a recorded step it must be a tensor.
    """
    records = engine.records_steps
    rate = torch.tensor(config.learning_rate, device=engine.device) if records else config.learning_rate
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    fused = records or None
    if isinstance(config, PretrainConfig) and config.optimiser == "adamw":
        betas, decay = (config.momentum, 0.999), 0.0 if config.decays_apart else config.weight_decay
        return torch.optim.AdamW(parameters, rate, betas, weight_decay=decay, fused=fused, capturable=records)
    return torch.optim.SGD(parameters, lr=rate, momentum=config.momentum, weight_decay=config.weight_decay, fused=fused)


def weights_that_decay(network: nn.Module, config: PretrainConfig) -> list[nn.Parameter]:
    """Weights that the step makes decay; none if the optimiser does it."""
    if not config.decays_apart:
        return []
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return [parameter for parameter in trained if config.decay_biases or parameter.ndim > 1]


def _both_views(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.repeat(2)

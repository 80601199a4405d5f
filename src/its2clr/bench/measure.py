"""The benchmarks: each stage beside its yardsticks, one after the other in one process."""

import importlib.util
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from its2clr.aggregators.training import train_aggregators
from its2clr.bag_features import BagFeatures
from its2clr.bench import yardsticks
from its2clr.bench.yardsticks import rate, wait
from its2clr.config import AggregatorTraining, EngineConfig, PretrainConfig, RefineConfig, RunConfig
from its2clr.encoders.encoder import EmbeddingNetwork
from its2clr.encoders.extraction import extract_features
from its2clr.encoders.weights import create_network
from its2clr.engine.devices import Engine
from its2clr.pretrain.loop import epoch_indices
from its2clr.pretrain.simclr import simclr_objective
from its2clr.refine.objectives import OBJECTIVES
from its2clr.refine.pseudo_labels import Pools
from its2clr.refine.sampling import epoch_batches
from its2clr.tile_store import TileStore
from its2clr.training import Batches, Objective, TrainingStep, train_epoch
from its2clr.views.drawn import draw
from its2clr.views.maker import ViewMaker
from its2clr.views.plain import apply


@dataclass(frozen=True)
class Size:
    """How large the benchmarks are.

    Attributes:
        side: Pixels along a side of a tile.
        batch: Tiles per step.
        tiles: Tiles of the training benchmarks; the largest of the four sizes.
        update_tiles: Tiles of the pseudo-label update.
        bags: Bags of the aggregator; the largest of the four sizes.
        bag_size: Instances per bag.
        aggregator_epochs: Epochs of the aggregator, in benchmark and update.
        loader_workers: Processes of the common way.
        seconds: How long a rate is measured.
        recipe_side: As `side`, for the recipes; instance norm needs 64 pixels.
        recipe_tiles: Tiles for the recipes.
    """

    side: int
    batch: int
    tiles: int
    update_tiles: int
    bags: int
    bag_size: int
    aggregator_epochs: int
    loader_workers: int
    seconds: float
    recipe_side: int
    recipe_tiles: int


SIZES = {
    "full": Size(224, 512, 16_384, 250_000, 216, 600, 350, 16, 3.0, 224, 8_192),
    "small": Size(32, 64, 2_048, 2_048, 24, 30, 3, 2, 1.0, 64, 256),
    "tiny": Size(32, 8, 64, 64, 16, 6, 1, 0, 0.01, 64, 16),
}
COMMON_WAYS = {"common way (JPEG, DataLoader, torchvision)": True, "common way, tiles already decoded": False}
"""How SimCLR is usually fed, and whether its tiles are JPEGs to be decoded."""
SHARES = (0.125, 0.25, 0.5, 1.0)
"""The four sizes, as shares of the largest."""


class Bench:
    """Measures on one engine, with the networks and tiles that all benchmarks share.

    Args:
        size: How large.
        engine: Device and precision.
        config: Encoder, projector and optimiser; the defaults are the paper's.
        tiles: Tiles to use; None: random ones.
    """

    def __init__(
        self, size: Size, engine: Engine, config: RunConfig | None = None, tiles: TileStore | None = None
    ) -> None:
        self.size, self.engine, self.config = size, engine, config or RunConfig()
        self.tiles = tiles or self._random_tiles(size.tiles)
        self.finished = self.tiles.images[: 2 * size.batch].float() / 255

    def network(self) -> EmbeddingNetwork:
        """A fresh network on the device."""
        torch.manual_seed(0)
        return create_network(self.config).to(self.engine.device)

    def training(self) -> dict[str, float]:
        """Images (two views of each tile) per second: SimCLR and refinement epochs beside the bare training step."""
        images = self.tiles.images[: self.size.batch].cpu()
        found = {"bare training": self.bare_training(), "SimCLR epoch": self._epochs(self.tiles, *self._simclr())}
        if self.engine.device.type == "cuda":
            found["bare training, compiled"] = self.bare_training(compiled=True)
            found["SimCLR epoch from host memory"] = self._epochs(TileStore(self.tiles.images.cpu()), *self._simclr())
        prepared = OBJECTIVES.find("supervised_contrastive")(self.network(), self.config.refine, 0)
        found["refinement epoch"] = self._epochs(self.tiles, prepared.loss, self.config.refine, self.refine_batches)
        for way, encoded in COMMON_WAYS.items():
            found[way] = yardsticks.common_way(
                self.network(), images, self.config.pretrain.views, self.engine, self.size.loader_workers, encoded
            )
        return found

    def bare_training(self, *, compiled: bool = False) -> float:
        """Images per second of the network alone in training."""
        network = self.network()
        if compiled:
            network.compile(dynamic=False)
        return yardsticks.bare_training(network, self.finished, self.engine, self.size.seconds)

    def views(self) -> dict[str, float]:
        """Views per second with SimCLR's settings: ours, the same without the kernel, and two libraries.

        torchvision draws once for a whole batch, so its views are not what SimCLR wants; it is here as a yardstick.
        """
        engine, batch = self.engine, 2 * self.size.batch
        views = self.config.pretrain.views
        maker = ViewMaker(views, engine.device, "bench", fused=engine.records_steps)
        rows = torch.arange(self.size.batch, device=engine.device)
        images = self.tiles.images[:batch]

        def plain() -> Tensor:
            order = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)
            return apply(images, draw(views, batch, self.size.side, maker.generator, engine.device, order))

        ways: dict[str, Callable[[], object]] = {
            "ours": lambda: maker.pair(self.tiles.images, rows),
            "plain operations": plain,
        }
        transform = yardsticks.torchvision_views(views, self.size.side)
        ways["torchvision v2, one draw per batch"] = lambda: transform(images)
        if importlib.util.find_spec("kornia") is not None:
            augment = yardsticks.kornia_views(views, self.size.side)
            ways["kornia"] = lambda: augment(images.float() / 255)
        return {name: rate(way, batch, engine, self.size.seconds / 2) for name, way in ways.items()}

    def extraction(self) -> dict[str, float]:
        """Images per second: extraction from the store beside bare inference."""
        return {"bare inference": self.bare_inference(), "extraction": self.extraction_from_store()}

    def bare_inference(self) -> float:
        """Images per second of the encoder alone."""
        images = self.finished[: self.config.engine.extract_batch_size]
        return yardsticks.bare_inference(self.network().encoder, images, self.engine, self.size.seconds)

    def extraction_from_store(self) -> float:
        """Images per second of the stage that extracts features."""
        encoder, batch = self.network().encoder, self.config.engine.extract_batch_size
        work = lambda: extract_features(encoder, self.tiles, self.engine, batch)  # noqa: E731
        return rate(work, len(self.tiles), self.engine, self.size.seconds, warm_up=1)

    def aggregators(self) -> dict[str, float]:
        """Seconds per epoch of DS-MIL, one bag per step: a plain loop, one seed, five seeds."""
        bags = self._bags(self.size.bags)
        config = AggregatorTraining(epochs=self.size.aggregator_epochs)
        self._aggregator_seconds(bags, [0], epochs=5)
        return {
            "plain loop": yardsticks.plain_loop(config, bags, self.engine),
            "1 seed": self._aggregator_seconds(bags, [1]) / config.epochs,
            "5 seeds": self._aggregator_seconds(bags, [1, 2, 3, 4, 5]) / config.epochs,
        }

    def update(self) -> dict[str, float]:
        """Seconds of one pseudo-label update: features of all tiles, aggregator, instance probabilities."""
        engine, size = self.engine, self.size
        tiles = self._random_tiles(size.update_tiles)
        encoder = self.network().encoder
        extract_features(encoder, self.tiles, engine, self.config.engine.extract_batch_size)
        wait(engine)
        started = time.perf_counter()
        features = extract_features(encoder, tiles, engine, self.config.engine.extract_batch_size)
        wait(engine)
        extracted = time.perf_counter()
        offsets = torch.linspace(0, len(tiles), size.bags + 1).long()
        bags = BagFeatures(features, offsets, torch.arange(size.bags) % 2)
        config = AggregatorTraining(epochs=size.aggregator_epochs)
        train_aggregators(config, bags, bags, [0]).predict(bags)
        wait(engine)
        ended = time.perf_counter()
        return {
            "tiles": float(len(tiles)),
            "extraction": extracted - started,
            "aggregator": ended - extracted,
            "update": ended - started,
        }

    def scaling(self) -> dict[str, dict[str, float]]:
        """Seconds at four sizes: a SimCLR epoch and extraction by tiles, an epoch of the aggregator by bags."""
        kinds = ("SimCLR epoch, tiles", "extraction, tiles", "aggregator, bags")
        found: dict[str, dict[str, float]] = {kind: {} for kind in kinds}
        objective, config, _ = self._simclr()
        step = self._step(self.tiles, objective, config)
        encoder = self.network().encoder
        self._epoch(step, Batches(epoch_indices(len(self.tiles), self.size.batch, 0, 0)), 0)
        for share in SHARES:
            count = int(share * len(self.tiles))
            batches = Batches(epoch_indices(count, self.size.batch, 0, 1))
            part = TileStore(self.tiles.images[:count])
            found["SimCLR epoch, tiles"][str(count)] = self._epoch(step, batches, 1)
            extract = lambda part=part: extract_features(encoder, part, self.engine)  # noqa: E731
            found["extraction, tiles"][str(count)] = 1 / rate(extract, 1, self.engine, self.size.seconds / 4, warm_up=1)
            bags = max(int(share * self.size.bags), 2)
            epochs = max(self.size.aggregator_epochs // 7, 1)
            found["aggregator, bags"][str(bags)] = (
                self._aggregator_seconds(self._bags(bags), [0], epochs=epochs) / epochs
            )
        return found

    def agreement(self) -> dict[str, float]:
        """Mean loss of an epoch as it is trained here, and of the plainest: float32, step by step, not compiled."""
        objective, config, _ = self._simclr()
        batches = Batches(epoch_indices(min(len(self.tiles), 12 * self.size.batch), self.size.batch, 0, 0))
        fast = self._step(self.tiles, objective, config)
        device = "cuda" if self.engine.device.type == "cuda" else "cpu"
        plain_engine = Engine(EngineConfig(accelerator=device, precision="32-true", compile="never"))
        plain_engine.bars.enabled = False
        plain = self._step(self.tiles, objective, config, plain_engine)
        plain.replays = False
        results = [
            train_epoch(step, batches, [0.01] * len(batches.indices), (0, "bench", 1)).loss for step in (fast, plain)
        ]
        return {"as trained": results[0], "float32, plain": results[1], "difference": abs(results[0] - results[1])}

    def _random_tiles(self, count: int) -> TileStore:
        """Tiles of random bytes on the device: as many as asked for, or as fill half of its free memory."""
        device, nbytes = self.engine.device, 3 * self.size.side**2
        if device.type == "cuda":
            count = min(count, int(torch.cuda.mem_get_info(device)[0] / 2 / nbytes))
        generator = torch.Generator(device).manual_seed(0)
        shape = (count, 3, self.size.side, self.size.side)
        return TileStore(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator, device=device))

    def _bags(self, count: int) -> BagFeatures:
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(count * self.size.bag_size, 512, generator=generator).to(self.engine.device)
        return BagFeatures(features, torch.arange(count + 1) * self.size.bag_size, torch.arange(count) % 2)

    def _aggregator_seconds(self, bags: BagFeatures, seeds: list[int], epochs: int | None = None) -> float:
        started = time.perf_counter()
        train_aggregators(AggregatorTraining(epochs=epochs or self.size.aggregator_epochs), bags, bags, seeds)
        wait(self.engine)
        return time.perf_counter() - started

    def _simclr(self) -> tuple[Objective, PretrainConfig, Callable[[int], Batches]]:
        indices = lambda epoch: Batches(epoch_indices(len(self.tiles), self.size.batch, 0, epoch))  # noqa: E731
        return simclr_objective(self.config.pretrain.temperature), self.config.pretrain, indices

    def refine_batches(self, epoch: int) -> Batches:
        """Batches of a refinement epoch, half of the tiles from negative bags."""
        rows = np.arange(len(self.tiles))
        pools = Pools(rows[: len(rows) // 2], rows[len(rows) // 2 : 5 * len(rows) // 8], rows[5 * len(rows) // 8 :])
        steps = len(rows) // self.size.batch
        return epoch_batches(pools, self.config.refine, epoch + 20, steps, self.size.batch, 0)

    def _step(
        self,
        tiles: TileStore,
        objective: Objective,
        config: PretrainConfig | RefineConfig,
        engine: Engine | None = None,
    ) -> TrainingStep:
        return TrainingStep(self.network(), tiles, objective, config, self.size.batch, 1, engine or self.engine)

    def _epochs(
        self,
        tiles: TileStore,
        objective: Objective,
        config: PretrainConfig | RefineConfig,
        batches: Callable[[int], Batches],
    ) -> float:
        return self.epochs(self._step(tiles, objective, config), batches)

    def epochs(
        self,
        step: TrainingStep,
        batches: Callable[[int], Batches],
        after_step: Callable[[int], None] | None = None,
    ) -> float:
        """Images per second over two epochs, sampling included, after one epoch that compiles and records."""
        self._epoch(step, batches(0), 0, after_step)
        started = time.perf_counter()
        drawn = [batches(epoch) for epoch in (1, 2)]
        for epoch, of_epoch in enumerate(drawn, start=1):
            self._epoch(step, of_epoch, epoch, after_step)
        return sum(2 * of_epoch.indices.numel() for of_epoch in drawn) / (time.perf_counter() - started)

    def _epoch(
        self, step: TrainingStep, batches: Batches, epoch: int, after_step: Callable[[int], None] | None = None
    ) -> float:
        started = time.perf_counter()
        train_epoch(step, batches, [1e-4] * len(batches.indices), (0, "bench", epoch), after_step)
        wait(self.engine)
        return time.perf_counter() - started


def hardware(engine: Engine) -> dict[str, str]:
    """What the numbers were measured on."""
    device = (
        torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else platform.processor() or "CPU"
    )
    return {
        "device": device,
        "precision": engine.precision,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": str(os.cpu_count()),
    }

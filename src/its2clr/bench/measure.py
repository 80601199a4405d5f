"""The benchmarks: each stage beside its limit, in one process, one after the other."""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from its2clr.aggregators.config import AggregatorTraining
from its2clr.aggregators.data import BagFeatures
from its2clr.aggregators.stacked import build
from its2clr.aggregators.training import train_aggregators
from its2clr.bench.limits import bare_inference, bare_training, rate, wait
from its2clr.config import RunConfig, ViewsConfig
from its2clr.encoders.encoder import EmbeddingNetwork
from its2clr.encoders.extraction import extract_features
from its2clr.encoders.weights import create_network
from its2clr.engine.devices import Engine
from its2clr.engine.tiles import TileStore
from its2clr.pretrain.loop import epoch_indices
from its2clr.pretrain.simclr import simclr_objective
from its2clr.refine.objectives import find_objective
from its2clr.refine.pseudo_labels import Pools
from its2clr.refine.sampling import epoch_batches
from its2clr.training import Batches, TrainingStep, make_optimiser, train_epoch
from its2clr.views import ViewMaker


@dataclass(frozen=True)
class Size:
    """How large the benchmarks are."""

    side: int
    batch: int
    tiles: int
    bags: int
    bag_size: int
    aggregator_epochs: int
    loader_workers: int
    seconds: float


SIZES = {
    "full": Size(224, 512, 40_000, 216, 600, 20, 16, 4.0),
    "small": Size(32, 64, 2_000, 24, 30, 3, 2, 1.0),
    "tiny": Size(32, 8, 64, 8, 6, 1, 0, 0.01),
}


class Bench:
    """Measures on one engine, with the networks and tiles that all benchmarks share.

    Args:
        size: How large.
        engine: Device and precision.
        config: Encoder, projector and optimiser; the defaults are the paper's.
    """

    def __init__(self, size: Size, engine: Engine, config: RunConfig | None = None) -> None:
        self.size, self.engine, self.config = size, engine, config or RunConfig()
        generator = torch.Generator().manual_seed(0)
        shape = (size.tiles, 3, size.side, size.side)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        self.tiles = TileStore(images.to(engine.device))
        self.finished = (images[: 2 * size.batch].float() / 255).to(engine.device)

    def network(self) -> EmbeddingNetwork:
        """A fresh network on the device."""
        torch.manual_seed(0)
        return create_network(self.config).to(self.engine.device)

    def training(self) -> dict[str, float]:
        """SimCLR and refinement epochs, views, and the common way, beside the bare training step."""
        size, engine = self.size, self.engine
        bare = bare_training(self.network(), self.finished, engine, size.seconds)
        found = {"bare training": bare, "bare training, compiled": self._compiled()}
        found["SimCLR epoch"] = self._epochs(simclr_objective(0.5), self.config.pretrain.views, self._simclr_batches)
        prepared = find_objective("supervised_contrastive")(self.network(), self.config.refine, 0)
        found["refinement epoch"] = self._epochs(prepared.loss, self.config.refine.views, self._refine_batches)
        found["views"] = self._views(self.config.pretrain.views)
        found["common way (DataLoader, torchvision)"] = self._common_way()
        return found

    def extraction(self) -> dict[str, float]:
        """Extraction from the store beside bare inference."""
        network, batch = self.network(), self.config.engine.extract_batch_size
        images = self.finished[:batch]
        found = {"bare inference": bare_inference(network.encoder, images, self.engine, self.size.seconds)}
        work = lambda: extract_features(network.encoder, self.tiles, self.engine, batch)  # noqa: E731
        found["extraction"] = rate(work, len(self.tiles), self.engine, self.size.seconds, warm_up=1)
        return found

    def aggregators(self) -> dict[str, float]:
        """Seconds per epoch of DS-MIL, one bag per step: a plain loop, one seed, five seeds."""
        size, engine = self.size, self.engine
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(size.bags * size.bag_size, 512, generator=generator).to(engine.device)
        offsets = torch.arange(size.bags + 1) * size.bag_size
        bags = BagFeatures(features, offsets, torch.arange(size.bags) % 2)
        config = AggregatorTraining(epochs=size.aggregator_epochs)

        def train(seeds: list[int]) -> float:
            started = time.perf_counter()
            train_aggregators(config, bags, bags, seeds)
            wait(engine)
            return (time.perf_counter() - started) / size.aggregator_epochs

        train([0])
        return {
            "plain loop": _plain_loop(config, bags, engine),
            "1 seed": train([1]),
            "5 seeds": train([1, 2, 3, 4, 5]),
        }

    def _epochs(self, objective: Any, views: ViewsConfig, batches: Callable[[int], Batches], epochs: int = 3) -> float:
        """Views (two of each tile) per second of the last of some epochs, sampling included."""
        network = self.network()
        wrapped, optimiser = self.engine.set_up(network, make_optimiser(network, self.config.pretrain, self.engine))
        step = TrainingStep(wrapped, optimiser, self.tiles, objective, views, self.engine)
        rates = []
        for epoch in range(epochs):
            started = time.perf_counter()
            drawn = batches(epoch)
            train_epoch(step, drawn, [1e-4] * len(drawn.indices), (0, "bench", epoch))
            rates.append(2 * drawn.indices.numel() / (time.perf_counter() - started))
        return rates[-1]

    def _simclr_batches(self, epoch: int) -> Batches:
        return Batches(epoch_indices(len(self.tiles), self.size.batch, 0, epoch))

    def _refine_batches(self, epoch: int) -> Batches:
        rows = np.arange(len(self.tiles))
        pools = Pools(rows[: len(rows) // 2], rows[len(rows) // 2 : 5 * len(rows) // 8], rows[5 * len(rows) // 8 :])
        steps = len(rows) // self.size.batch
        return epoch_batches(pools, self.config.refine, epoch + 20, steps, self.size.batch, 0)

    def _compiled(self) -> float:
        if self.engine.device.type != "cuda":
            return float("nan")
        compiled: nn.Module = torch.compile(self.network())  # type: ignore[assignment]
        return bare_training(compiled, self.finished, self.engine, self.size.seconds)

    def _views(self, views: ViewsConfig) -> float:
        maker = ViewMaker(views, self.engine.device, "bench", fused=self.engine.records_steps)
        rows = torch.arange(self.size.batch, device=self.engine.device)
        return rate(lambda: maker.pair(self.tiles.images, rows), 2 * len(rows), self.engine, self.size.seconds)

    def _common_way(self) -> float:
        """Two torchvision views of each tile made by the workers of a DataLoader, fed to the same training step."""
        network, engine = self.network(), self.engine
        optimiser = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9)
        images = self.tiles.images[: max(self.size.batch * 8, 1)].cpu()
        loader = DataLoader(
            _TorchvisionViews(images, self.config.pretrain.views),
            batch_size=self.size.batch,
            num_workers=self.size.loader_workers,
            pin_memory=engine.device.type == "cuda",
        )
        count, started = 0, time.perf_counter()
        network.train()
        for first, second in loader:
            with engine.autocast():
                _, embeddings = network(torch.cat([first, second]).to(engine.device, non_blocking=True))
            loss = simclr_objective(0.5)(embeddings.float(), None, None)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            if count == 0:  # the workers have started
                wait(engine)
                started = time.perf_counter()
            count += 2 * len(first)
        wait(engine)
        return max(count - 2 * self.size.batch, 1) / (time.perf_counter() - started)


class _TorchvisionViews(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The usual way: two views of one tile at a time, by torchvision's transforms."""

    def __init__(self, images: torch.Tensor, config: ViewsConfig) -> None:
        from torchvision.transforms import v2

        self._images = images
        side = images.shape[-1]
        kernel = max(3, int(config.blur_kernel * side) // 2 * 2 + 1)
        jitter = v2.ColorJitter(config.brightness, config.contrast, config.saturation, config.hue)
        self._view = v2.Compose(
            [
                v2.ToDtype(torch.float32, scale=True),
                v2.RandomResizedCrop(side, scale=config.crop_scale or (1.0, 1.0), antialias=False),
                v2.RandomHorizontalFlip(config.horizontal_flip),
                v2.RandomVerticalFlip(config.vertical_flip),
                v2.RandomApply([jitter], config.jitter_probability),
                v2.RandomGrayscale(config.grayscale_probability),
                v2.RandomApply([v2.GaussianBlur(kernel, config.blur_sigma)], config.blur_probability),
            ]
        )

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self._images[index]
        return self._view(image), self._view(image)


def _plain_loop(config: AggregatorTraining, bags: BagFeatures, engine: Engine) -> float:
    """Seconds per epoch of the obvious loop: one bag, one step, a number read back each time."""
    assert bags.labels is not None
    aggregator = build(config.name, config.options, bags.feature_dim).to(engine.device)
    optimiser = torch.optim.Adam(aggregator.parameters(), config.learning_rate, config.betas)
    features = bags.features.split(bags.sizes.tolist())  # type: ignore[no-untyped-call]
    for epoch in range(2):
        started = time.perf_counter()
        total = 0.0
        for number in np.random.default_rng(epoch).permutation(len(features)):
            optimiser.zero_grad()
            output = aggregator(features[number][None])
            loss = aggregator.loss(output, bags.labels[number : number + 1])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            total += loss.item()
        wait(engine)
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
    }

"""What the stages are measured against: the bare network, which is the limit, and how it is usually done."""

import io
import time
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

from its2clr.aggregators.stacked import build
from its2clr.bag_features import BagFeatures
from its2clr.config import AggregatorTraining, ViewsConfig
from its2clr.engine.devices import Engine
from its2clr.pretrain.simclr import simclr_objective


def rate(work: Callable[[], object], images: int, engine: Engine, seconds: float = 2.0, warm_up: int = 3) -> float:
    """Images per second of some work that takes `images` of them, repeated for some seconds after a warm-up."""
    for _ in range(warm_up):
        work()
    wait(engine)
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds or count == 0:
        for _ in range(5):
            work()
            count += 1
        wait(engine)
    return count * images / (time.perf_counter() - started)


def wait(engine: Engine) -> None:
    """Wait until the device has done all it was given."""
    if engine.device.type == "cuda":
        torch.cuda.synchronize()


def bare_training(network: nn.Module, images: Tensor, engine: Engine, seconds: float) -> float:
    """Images per second of forward, backward and SGD on one batch of finished images, with next to no loss."""
    optimiser = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9, fused=engine.device.type == "cuda" or None)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        with engine.autocast():
            _, embeddings = network(images)
        embeddings.float().square().mean().backward()
        optimiser.step()

    network.train()
    return rate(step, len(images), engine, seconds)


def bare_inference(encoder: nn.Module, images: Tensor, engine: Engine, seconds: float) -> float:
    """Images per second of a forward pass on one batch of finished images."""
    encoder.eval()

    @torch.no_grad()
    def step() -> None:
        with engine.autocast():
            encoder(images)

    return rate(step, len(images), engine, seconds)


def common_way(
    network: nn.Module, images: Tensor, views: ViewsConfig, engine: Engine, workers: int, encoded: bool
) -> float:
    """Images per second of SimCLR as it is usually trained: torchvision views, made by the workers of a DataLoader.

    Each worker's first batch, of as many tiles as there are images, is not counted; its next three are.
    """
    batch = len(images)
    optimiser = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9)
    not_counted = max(workers, 1)
    tiles = _TorchvisionViews(images, views, 4 * not_counted * batch, encoded)
    loader = DataLoader(tiles, batch_size=batch, num_workers=workers, pin_memory=engine.device.type == "cuda")
    started = time.perf_counter()
    network.train()
    for number, (first, second) in enumerate(loader, start=1):
        with engine.autocast():
            _, embeddings = network(torch.cat([first, second]).to(engine.device, non_blocking=True))
        loss = simclr_objective(0.5)(embeddings.float(), None, None)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        if number == not_counted:
            wait(engine)
            started = time.perf_counter()
    wait(engine)
    return 2 * 3 * not_counted * batch / (time.perf_counter() - started)


class _TorchvisionViews(Dataset[tuple[Tensor, Tensor]]):
    """Two views of one tile at a time, by torchvision's transforms.

    Args:
        images: Decoded tiles; they come round again when there are fewer than `count`.
        config: The views.
        count: Tiles to hand out.
        encoded: Whether each tile is a JPEG to be decoded first, as in a folder of tiles.
    """

    def __init__(self, images: Tensor, config: ViewsConfig, count: int, encoded: bool) -> None:
        self._images: list[bytes] | Tensor = [_jpeg(image) for image in images] if encoded else images
        self._count = count
        self._view = torchvision_views(config, images.shape[-1])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        found = self._images[index % len(self._images)]
        image = found if isinstance(found, Tensor) else pil_to_tensor(Image.open(io.BytesIO(found)))
        return self._view(image), self._view(image)


def _jpeg(noise: Tensor) -> bytes:
    """A JPEG of soft patches with a little noise: noise alone would take longer to decode than a photograph."""
    small = noise[None, :, ::8, ::8].float()
    large = nn.functional.interpolate(small, size=noise.shape[-2:], mode="bilinear")[0]
    file = io.BytesIO()
    to_pil_image((large + noise.float() / 16).clamp(0, 255).to(torch.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def torchvision_views(config: ViewsConfig, side: int) -> Callable[[Tensor], Tensor]:
    """Torchvision's transforms, with one draw for all images they are given."""
    from torchvision.transforms import v2

    jitter = v2.ColorJitter(config.brightness, config.contrast, config.saturation, config.hue)
    views: Callable[[Tensor], Tensor] = v2.Compose(
        [
            v2.ToDtype(torch.float32, scale=True),
            v2.RandomResizedCrop(side, scale=config.crop_scale or (1.0, 1.0), antialias=False),
            v2.RandomHorizontalFlip(config.horizontal_flip),
            v2.RandomVerticalFlip(config.vertical_flip),
            v2.RandomApply([jitter], config.jitter_probability),
            v2.RandomGrayscale(config.grayscale_probability),
            v2.RandomApply([v2.GaussianBlur(_odd(config, side), config.blur_sigma)], config.blur_probability),
        ]
    )
    return views


def kornia_views(config: ViewsConfig, side: int) -> nn.Module:
    """Kornia's augmentations, with a draw for every image."""
    from kornia import augmentation as k  # type: ignore[import-not-found,unused-ignore]

    kernel = _odd(config, side)
    jitter = (config.brightness, config.contrast, config.saturation, config.hue)
    return nn.Sequential(
        k.RandomResizedCrop((side, side), scale=config.crop_scale or (1.0, 1.0)),
        k.RandomHorizontalFlip(config.horizontal_flip),
        k.RandomVerticalFlip(config.vertical_flip),
        k.ColorJitter(*jitter, p=config.jitter_probability),
        k.RandomGrayscale(p=config.grayscale_probability),
        k.RandomGaussianBlur((kernel, kernel), config.blur_sigma, p=config.blur_probability),
    )


def _odd(config: ViewsConfig, side: int) -> int:
    return max(3, int(config.blur_kernel * side) // 2 * 2 + 1)


def plain_loop(config: AggregatorTraining, bags: BagFeatures, engine: Engine) -> float:
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

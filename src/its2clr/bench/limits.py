"""What the machine can do at best: the bare network on data that is already there, with nothing around it."""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from its2clr.engine.devices import Engine


def rate(work: Callable[[], object], images: int, engine: Engine, seconds: float = 2.0, warm_up: int = 3) -> float:
    """Images per second of a piece of work, repeated for some time after a warm-up."""
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
    """Images per second of forward, backward and SGD on one batch of finished images; views and loss are nothing."""
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

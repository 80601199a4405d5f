"""Instance norm on a GPU: right, and how fast? `python benchmarks/norm_kernels.py` takes about 90 seconds.

1. The kernels of `its2clr.encoders.norm_kernels` against nn.InstanceNorm2d: results and gradients, float32 and
   bfloat16.
2. Images per second of training a ResNet-18 (bfloat16, channels last) with batch norm, with the instance norm of
   PyTorch and with ours: step by step, recorded as a CUDA graph, and compiled.
3. Each kernel at the sizes of the network, as a share of the bandwidth that a copy reaches.
4. In the time that is left, other sizes of the blocks.

Needs torch, Triton and timm (without timm, a plain ResNet-18). Writes $OUT/norm_kernels.json if OUT is set.
"""

import argparse
import importlib
import json
import os
import sys
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SOURCE = Path(__file__).resolve().parents[1] / "src"
FOUND: dict[str, Any] = {}
SHAPES = [(64, 112), (64, 56), (128, 28), (256, 14), (512, 7)]
"""Channels and sides in a ResNet-18 on 224 px."""
SIZES = {"64 px": (64, 512), "224 px": (224, 256)}
"""Side and images per step."""


def import_norms() -> tuple[Any, Any]:
    """The two modules; the package around them needs more libraries than they do, so it may be left out."""
    sys.path.insert(0, str(SOURCE))
    try:
        importlib.import_module("its2clr.encoders")
    except ImportError as error:
        say("note", f"without the package around the norms: {error}")
        package = types.ModuleType("its2clr.encoders")
        package.__path__ = [str(SOURCE / "its2clr" / "encoders")]
        sys.modules["its2clr.encoders"] = package
    return tuple(importlib.import_module(f"its2clr.encoders.{name}") for name in ("norms", "norm_kernels"))  # type: ignore[return-value]


def say(name: str, value: object) -> None:
    FOUND[name] = value
    shown = f"{value:.5g}" if isinstance(value, float) else value
    print(f"{name}: {shown}", flush=True)
    if out := os.environ.get("OUT"):
        (Path(out) / "norm_kernels.json").write_text(json.dumps(FOUND, indent=1, default=str))


def attempt(name: str, work: Callable[[], object]) -> None:
    """Do a part and say what it gives; if it fails, say so and go on."""
    try:
        value = work()
    except Exception as error:  # noqa: BLE001
        traceback.print_exc(limit=-4)
        say(name, f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        torch.cuda.empty_cache()
    else:
        if value is not None:
            say(name, value)


# 1. Right?


def difference(kernels: Any, shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> str:
    """Largest differences of result and gradients from nn.InstanceNorm2d in float64, beside those of PyTorch's own."""
    torch.manual_seed(0)
    x = (torch.randn(shape, device="cuda") * 2 + 5).to(dtype).contiguous(memory_format=torch.channels_last)
    shortcut = torch.randn_like(x) if kind == "shortcut" else None
    gradient = torch.randn_like(x)
    if kind != "norm":  # where the sum is next to zero, rounding decides whether ReLU lets the gradient through
        total = nn.functional.instance_norm(x.double()) + (0 if shortcut is None else shortcut.double())
        gradient *= total.abs() > 0.05

    def plain(x: Tensor, shortcut: Tensor | None) -> Tensor:
        normed = nn.functional.instance_norm(x)
        normed = normed if shortcut is None else normed + shortcut
        return normed if kind == "norm" else normed.relu()

    def run(way: Callable[..., Tensor], type_: torch.dtype) -> list[Tensor]:
        inputs = [None if t is None else t.to(type_).detach().requires_grad_() for t in (x, shortcut)]
        result = way(*inputs)
        result.backward(gradient.to(type_))
        return [result.detach().double(), *(t.grad.double() for t in inputs if t is not None)]  # type: ignore[union-attr]

    exact = run(plain, torch.float64)
    ours = run(lambda x, s: kernels.fused_instance_norm(x, s, 1e-5, kind != "norm"), dtype)
    theirs = run(plain, dtype)
    errors = [[(a - b).abs().max().item() for a, b in zip(way, exact, strict=True)] for way in (ours, theirs)]
    limit = 1e-4 if dtype == torch.float32 else 0.08
    verdict = "ok" if max(errors[0]) < limit else "WRONG"
    return f"{verdict} ours {[f'{e:.1e}' for e in errors[0]]} PyTorch {[f'{e:.1e}' for e in errors[1]]}"


def check(kernels: Any) -> None:
    for shape in [(3, 64, 7, 7), (2, 128, 28, 28), (2, 64, 56, 56), (2, 64, 112, 112), (5, 24, 33, 35), (4, 512, 2, 2)]:
        for dtype in (torch.float32, torch.bfloat16):
            for kind in ("norm", "relu", "shortcut"):
                name = f"right, {shape}, {str(dtype).removeprefix('torch.')}, {kind}"
                attempt(name, lambda s=shape, d=dtype, k=kind: difference(kernels, s, d, k))  # type: ignore[misc]


# 2. How fast is the network?


class Block(nn.Module):
    """As timm's, with what `FusedBlock` needs of it."""

    def __init__(self, width: int, channels: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, channels, 3, stride, 1, bias=False), norm(channels)
        self.act1, self.aa = nn.ReLU(inplace=True), nn.Identity()
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False), norm(channels)
        self.act2 = nn.ReLU(inplace=True)
        if stride != 1:
            self.downsample = nn.Sequential(nn.Conv2d(width, channels, 1, stride, bias=False), norm(channels))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.downsample(x) if hasattr(self, "downsample") else x
        x = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x)))))
        x += shortcut
        return self.act2(x)


def resnet18(kind: str, norms: Any) -> nn.Module:
    """A ResNet-18 with a kind of norm: of timm or, without it, plain."""
    try:
        import timm
    except ImportError:
        norm = {"batch norm": nn.BatchNorm2d, "nn.InstanceNorm2d": nn.InstanceNorm2d, "ours": norms.InstanceNorm}[kind]
        stem = norm(64)
        relu = nn.Identity() if kind == "ours" else nn.ReLU(inplace=True)
        if kind == "ours":
            stem.relu = True
        blocks: list[nn.Module] = []
        for width, channels, stride in [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]:
            blocks += [Block(width, channels, stride, norm), Block(channels, channels, 1, norm)]
        if kind == "ours":
            blocks = [norms.FusedBlock(block) for block in blocks]
        start = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), stem, relu, nn.MaxPool2d(3, 2, 1)]
        return nn.Sequential(*start, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    norm_layer = {} if kind == "batch norm" else {"norm_layer": nn.InstanceNorm2d}
    network: nn.Module = timm.create_model("resnet18", num_classes=0, **norm_layer)
    if kind == "ours":
        norms.fuse_norms(network)
    return network


class Training:
    """Steps of forward, backward and SGD on one batch."""

    def __init__(self, kind: str, norms: Any, side: int, batch: int) -> None:
        torch.manual_seed(0)
        self.network = resnet18(kind, norms).cuda().to(memory_format=torch.channels_last).train()
        self.optimiser = torch.optim.SGD(self.network.parameters(), lr=1e-4, momentum=0.9, fused=True)
        self.images = torch.rand(batch, 3, side, side, device="cuda").contiguous(memory_format=torch.channels_last)

    def step(self) -> None:
        self.optimiser.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            features = self.network(self.images)
        features.float().square().mean().backward()
        self.optimiser.step()

    def recorded(self) -> Callable[[], None]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay

    def rate(self, step: Callable[[], None], seconds: float) -> float:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        count, started = 0, time.perf_counter()
        while count < 4 or time.perf_counter() - started < seconds:
            step()
            count += 1
            if count % 4 == 0:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return count * len(self.images) / (time.perf_counter() - started)


def train(norms: Any, seconds: float) -> None:
    for size, (side, batch) in SIZES.items():
        for kind in ("batch norm", "ours", "nn.InstanceNorm2d"):
            for way in ("step by step", "recorded"):

                def measure(kind: str = kind, way: str = way, side: int = side, batch: int = batch) -> float:
                    training = Training(kind, norms, side, batch)
                    return training.rate(training.recorded() if way == "recorded" else training.step, seconds)

                name = f"images/s, {size}, {way}, {kind}"
                attempt(name, measure)
                reference = FOUND.get(f"images/s, {size}, {way}, batch norm")
                if kind == "ours" and isinstance(reference, float) and isinstance(FOUND[name], float):
                    say(f"ratio, {size}, {way}, ours / batch norm", FOUND[name] / reference)
                torch.cuda.empty_cache()


def train_compiled(norms: Any, seconds: float) -> None:
    side, batch = SIZES["224 px"]
    for kind in ("batch norm", "ours"):

        def measure(kind: str = kind) -> float:
            training = Training(kind, norms, side, batch)
            training.network.compile(dynamic=False)
            return training.rate(training.step, seconds)

        attempt(f"images/s, 224 px, compiled, {kind}", measure)
        torch.cuda.empty_cache()


# 3. How fast are the kernels?


def milliseconds(work: Callable[[], object], repeats: int = 10) -> float:
    for _ in range(2):
        work()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def copy_bandwidth() -> float:
    """Bytes per millisecond, read and written, of a copy."""
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source))


def kernel_times(kernels: Any, channels: int, side: int, images: int = 512) -> dict[str, float]:
    """Milliseconds of forward and backward pass with ReLU, and with a shortcut."""
    x = torch.randn(images, channels, side, side, device="cuda", dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last)
    gradient = torch.randn_like(x)
    y, means, scales = kernels.forward_pass(x, None, 1e-5, True)
    return {
        "forward": milliseconds(lambda: kernels.forward_pass(x, None, 1e-5, True)),
        "backward": milliseconds(lambda: kernels.backward_pass(gradient, x, None, means, scales, True)),
        "forward, shortcut": milliseconds(lambda: kernels.forward_pass(x, gradient, 1e-5, True)),
        "backward, shortcut": milliseconds(lambda: kernels.backward_pass(gradient, x, y, means, scales, True)),
    }


PASSES = {
    True: {"forward": 2, "backward": 3, "forward, shortcut": 3, "backward, shortcut": 5},
    False: {"forward": 3, "backward": 5, "forward, shortcut": 4, "backward, shortcut": 7},
}
"""How often a kernel goes over the tensor at least, held or streamed."""


def time_kernels(kernels: Any) -> None:
    bandwidth = copy_bandwidth()
    say("copy, TB/s", bandwidth / 1e9)
    for channels, side in SHAPES:
        held = kernels.Plan(side * side, channels).held
        nbytes = 2 * 512 * channels * side * side

        def measure(channels: int = channels, side: int = side, held: bool = held, nbytes: int = nbytes) -> str:
            found = kernel_times(kernels, channels, side)
            parts = [
                f"{name} {ms:.3f} ms = {PASSES[held][name] * nbytes / ms / bandwidth:.2f}" for name, ms in found.items()
            ]
            return "; ".join(parts)

        attempt(f"kernel, 512 x {channels} x {side} x {side}, {'held' if held else 'streamed'}", measure)


# 4. Other sizes of the blocks


VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "64 values per thread": {"VALUES_PER_THREAD": 64},
    "16 values per thread": {"VALUES_PER_THREAD": 16},
    "held 16384": {"HELD_VALUES": 16_384},
    "held 4096": {"HELD_VALUES": 4_096},
    "streamed 128 x 64": {"STREAMED_TILE": (128, 64)},
    "streamed 32 x 64": {"STREAMED_TILE": (32, 64)},
    "streamed 2048 pixels": {"STREAMED_PIXELS": 2048},
    "streamed 512 pixels": {"STREAMED_PIXELS": 512},
    "28 x 28 streamed": {"MOST_HELD_VALUES": 8_192},
    "56 x 56 held": {"MOST_HELD_VALUES": 65_536},
}


def vary(kernels: Any, until: float) -> None:
    before = {name: getattr(kernels, name) for change in VARIANTS.values() for name in change}
    plans: dict[tuple[int, int], set[str]] = {}
    for variant, change in VARIANTS.items():
        vars(kernels).update(before | change)
        for channels, side in SHAPES:
            plan = str(vars(kernels.Plan(side * side, channels)))
            if plan in plans.setdefault((channels, side), set()):
                continue  # this change does not concern this size
            plans[channels, side].add(plan)
            if time.monotonic() > until:
                say("variants", "no time left for the others")
                vars(kernels).update(before)
                return

            def measure(channels: int = channels, side: int = side) -> str:
                return "; ".join(f"{name} {ms:.3f} ms" for name, ms in kernel_times(kernels, channels, side).items())

            attempt(f"variant, {variant}, {channels} x {side} x {side}", measure)
    vars(kernels).update(before)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=85, help="after these, no further variant is begun")
    parser.add_argument("--each", type=float, default=1.0, help="how long a rate is measured")
    chosen = parser.parse_args()
    until = time.monotonic() + chosen.seconds
    norms, kernels = import_norms()
    say("machine", f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    check(kernels)
    train(norms, chosen.each)
    attempt("kernels", lambda: time_kernels(kernels))
    if time.monotonic() < until - 25:
        train_compiled(norms, chosen.each)
    attempt("variants", lambda: vary(kernels, until))


if __name__ == "__main__":
    main()

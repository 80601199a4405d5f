"""Instance norm of the package against PyTorch's; without a GPU the kernels run in Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import timm
import torch
from torch import nn

from its2clr.config import EncoderConfig
from its2clr.encoders import norms
from its2clr.encoders.encoder import create_encoder
from its2clr.encoders.norms import FusedBlock, InstanceNorm, fuse_norms

# (N, C, H, W): one pixel, held and streamed, with channels and pixels that do not fill the blocks, and several splits
SIZES = [(3, 8, 1, 1), (1, 512, 2, 2), (3, 64, 7, 7), (1, 5, 13, 9), (2, 40, 28, 28), (1, 24, 33, 34), (1, 8, 56, 56)]
LARGE = [(32, 64, 16, 16), (3, 512, 7, 7), (32, 64, 56, 56), (3, 64, 112, 112), (1, 8, 112, 112)]
"""For a GPU: the interpreter would take minutes."""
KINDS = ("norm", "relu", "shortcut")
TOLERANCES = {torch.float32: 5e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def plain(x, shortcut, kind):
    """The slow reference."""
    centred = x - x.mean((2, 3), keepdim=True)
    normed = centred / (centred.square().mean((2, 3), keepdim=True) + 1e-5).sqrt()
    normed = normed if shortcut is None else normed + shortcut
    return normed if kind == "norm" else normed.relu()


def inputs(shape, dtype, device, kind):
    generator = torch.Generator().manual_seed(sum(shape))
    draw = lambda: torch.randn(shape, generator=generator)  # noqa: E731
    x, gradient = (draw() * 2 + 30 * draw()[:, :, :1, :1]).to(dtype), draw()
    shortcut = draw().to(dtype) if kind == "shortcut" else None
    if kind != "norm":  # next to zero, rounding decides whether ReLU lets the gradient through
        gradient *= plain(x.double(), None if shortcut is None else shortcut.double(), "norm").abs() > 0.05
    last = lambda t: t.to(device, dtype, memory_format=torch.channels_last)  # noqa: E731
    return last(x), None if shortcut is None else last(shortcut), last(gradient)


def results(way, x, shortcut, gradient):
    """Result and gradients, in float64."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, shortcut)]
    result = way(*leaves)
    result.backward(gradient)
    return result, [result.detach().double(), *(t.grad.double() for t in leaves if t is not None)]


def compare_kernels(device):
    from its2clr.encoders.norm_kernels import fused_instance_norm

    for shape in [*SIZES, *LARGE] if device == "cuda" else SIZES:
        for kind in KINDS:
            for dtype in TOLERANCES if device == "cuda" or shape[1] in {64, 24} else [torch.float32]:
                x, shortcut, gradient = inputs(shape, dtype, device, kind)
                doubles = [None if t is None else t.double() for t in (x, shortcut, gradient)]
                _, expected = results(lambda x, s, k=kind: plain(x, s, k), *doubles)
                ours = lambda x, s, k=kind: fused_instance_norm(x, s, 1e-5, k != "norm")  # noqa: E731
                result, found = results(ours, x, shortcut, gradient)
                assert result.dtype == dtype
                assert result.is_contiguous(memory_format=torch.channels_last)
                for one, other in zip(found, expected, strict=True):
                    torch.testing.assert_close(
                        one, other, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype],
                        msg=lambda text, of=(shape, kind, dtype): f"{of}: {text}",
                    )  # fmt: skip


def compare_layouts_and_batches(device):
    """Another memory layout gives the same, and so does an image alone; what is not a number is not hidden by ReLU."""
    from its2clr.encoders.norm_kernels import fused_instance_norm

    for side in (6, 40):
        x = torch.randn(3, 24, side, side, device=device)
        whole = fused_instance_norm(x, None, 1e-5, True)
        assert torch.equal(whole, fused_instance_norm(x.to(memory_format=torch.channels_last), None, 1e-5, True))
        assert torch.equal(whole[1:2], fused_instance_norm(x[1:2], None, 1e-5, True))
        x[1, 5, 2, 3] = torch.nan
        broken = fused_instance_norm(x, None, 1e-5, True)
        assert broken[1, 5].isnan().all()
        assert broken.isnan().sum() == side * side


def compare_compiled(device):
    """A network is the same compiled, with its norms as operators in one graph, as step by step."""
    from its2clr.encoders.norm_kernels import fused_instance_norm

    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1)).to(device)
    images = torch.randn(2, 3, 12, 12, device=device)

    def forward():
        first = fused_instance_norm(network[0](images), None, 1e-5, True)
        return fused_instance_norm(network[1](first), first, 1e-5, True).square().mean()

    plain_loss = forward()
    plain_loss.backward()
    expected = [weight.grad.clone() for weight in network.parameters()]
    network.zero_grad()
    loss = torch.compile(forward, backend="aot_eager", fullgraph=True)()
    loss.backward()
    torch.testing.assert_close(loss, plain_loss)
    for weight, gradient in zip(network.parameters(), expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient)


def compare(device):
    compare_kernels(device)
    compare_layouts_and_batches(device)
    compare_compiled(device)


@pytest.mark.slow
def test_the_kernels_do_what_the_plain_operations_do():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        compare("cuda")
        return
    code = "from tests.encoders.test_norms import compare; compare('cpu')"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=300)


NETWORKS = {
    "resnet18": ({}, 8),
    "resnet50": ({"layers": (1, 1, 1, 1)}, 4),
    "resnet18d": ({}, 8),  # norms and ReLUs within the stem, which are left apart
    "resnetblur18": ({}, 8),
    "seresnet18": ({}, 0),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_with_fused_norms_is_the_one_of_timm(name):
    options, blocks = NETWORKS[name]
    torch.manual_seed(0)
    ours, theirs = (
        timm.create_model(name, num_classes=0, norm_layer=nn.InstanceNorm2d, stem_width=8, **options) for _ in range(2)
    )
    theirs.load_state_dict(ours.state_dict())
    fuse_norms(ours)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert sum(isinstance(module, FusedBlock) for module in ours.modules()) == blocks
    images = torch.rand(2, 3, 64, 64)
    features = [network(images) for network in (ours, theirs)]
    assert torch.equal(*features)
    for one in features:
        one.square().sum().backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_blocks_with_something_in_between_are_left_apart():
    dropped = timm.create_model("resnet18", norm_layer=nn.InstanceNorm2d, drop_path_rate=0.2, act_layer=nn.ReLU)
    fuse_norms(dropped)
    assert sum(isinstance(module, FusedBlock) for module in dropped.modules()) == 1  # the first is never dropped
    smooth = timm.create_model("resnet18", norm_layer=nn.InstanceNorm2d, act_layer=nn.SiLU)
    fuse_norms(smooth)
    assert not any(module.relu for module in smooth.modules() if isinstance(module, InstanceNorm))
    with_weights = nn.Sequential(nn.InstanceNorm2d(4, affine=True), nn.InstanceNorm2d(4, track_running_stats=True))
    fuse_norms(with_weights)
    assert not any(isinstance(module, InstanceNorm) for module in with_weights)


def test_all_norms_of_an_encoder_call_the_kernel_where_it_takes_them(monkeypatch):
    calls = []

    def kernel(x, shortcut, eps, relu):
        calls.append((shortcut is not None, relu))
        return plain(x, shortcut, "relu" if relu else "norm")

    monkeypatch.setattr(norms, "_find_kernel", lambda: kernel)
    monkeypatch.setattr(norms, "_fits", lambda x, shortcut: x.dtype == torch.float32)
    encoder = create_encoder(EncoderConfig(norm="instance"))
    images = torch.rand(2, 3, 64, 64)
    found = encoder(images)
    # stem and first norms, downsampling, ends of blocks
    assert [calls.count(kind) for kind in [(False, True), (False, False), (True, True)]] == [9, 3, 8]
    for module in encoder.modules():
        if isinstance(module, InstanceNorm):
            module._kernel = None
    torch.testing.assert_close(encoder(images), found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2])
def test_gradients_are_right_for_one_image_too(count):
    norm = InstanceNorm(8)
    norm.relu = True
    x, shortcut, gradient = inputs((count, 8, 5, 5), torch.float64, "cpu", "shortcut")
    _, expected = results(lambda x, s: plain(x, s, "relu"), x, shortcut, gradient)
    _, found = results(norm, x, shortcut, gradient)
    torch.testing.assert_close(found, expected)


def test_one_pixel_is_refused_as_pytorch_does():
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        InstanceNorm(4)(torch.zeros(2, 4, 1, 1))
    assert not norms._fits(torch.zeros(2, 4, 1, 1, device="meta"), None)

"""Instance norm at the speed of batch norm, for the networks of timm.

On a GPU the layer of PyTorch copies channels-last tensors to another layout and hands them on in that, which makes a
ResNet several times slower. `InstanceNorm` calls the kernels of `its2clr.encoders.norm_kernels` there, which also add
the shortcut of a residual block and do ReLU, in the same pass. None of these layers has weights, so nothing that is
saved changes.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import group_norm, instance_norm, relu_

Kernel = Callable[[Tensor, Tensor | None, float, bool], Tensor]
"""x, shortcut, eps, whether ReLU follows -> the result."""
DTYPES = {torch.float32, torch.bfloat16, torch.float16}


class InstanceNorm(nn.InstanceNorm2d):
    """Instance norm of (N, C, H, W) without weights and running statistics.

    Attributes:
        relu: Whether ReLU follows.
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__(channels, eps)
        self.relu = False
        self._kernel = _find_kernel()

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """Normalise x; a shortcut is added before ReLU.

        Raises:
            ValueError: The images have one pixel.
        """
        if self._kernel is not None and _fits(x, shortcut):
            return self._kernel(x, shortcut, self.eps, self.relu)
        # On a CPU, PyTorch 2.15 gives wrong gradients to a single image, if they come channels last.
        alone = torch.is_grad_enabled() and len(x) == 1 and x[0, 0].numel() > 1
        normed = group_norm(x, self.num_features, eps=self.eps) if alone else instance_norm(x, eps=self.eps)
        if shortcut is not None:
            normed += shortcut
        return relu_(normed) if self.relu else normed

    def extra_repr(self) -> str:
        """Width, and whether ReLU follows."""
        return f"{self.num_features}, eps={self.eps}, relu={self.relu}"


def _find_kernel() -> Kernel | None:
    """The kernel, where there is a GPU and Triton."""
    if not torch.cuda.is_available() or find_spec("triton") is None:
        return None
    from its2clr.encoders.norm_kernels import fused_instance_norm

    return fused_instance_norm


def _fits(x: Tensor, shortcut: Tensor | None) -> bool:
    """Whether the kernel takes this. One pixel is left to PyTorch, which refuses it."""
    same = shortcut is None or (shortcut.dtype == x.dtype and shortcut.shape == x.shape)
    return same and x.is_cuda and x.dtype in DTYPES and x.shape[2] * x.shape[3] > 1


class FusedBlock(nn.Module):
    """A residual block of timm's ResNet whose norms do the ReLUs and the addition; its parts keep their names.

    Args:
        block: `BasicBlock` (two convolutions) or `Bottleneck` (three), with norms of the class above.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        for name, part in block.named_children():
            if not isinstance(part, nn.ReLU):
                self.add_module(name, part)
        self._last = 3 if hasattr(block, "conv3") else 2
        for norm in self._norms():
            norm.relu = True

    def forward(self, x: Tensor) -> Tensor:
        """Features of the same number or, with a stride, a quarter of the pixels."""
        downsample = getattr(self, "downsample", None)
        shortcut = x if downsample is None else downsample(x)
        *norms, last = self._norms()
        for number, norm in enumerate(norms, start=1):
            x = norm(self.get_submodule(f"conv{number}")(x))
        x = self.get_submodule(f"conv{self._last}")(self.get_submodule("aa")(x))
        result: Tensor = last(x, shortcut)
        return result

    def _norms(self) -> list[InstanceNorm]:
        return [cast("InstanceNorm", getattr(self, f"bn{number}")) for number in range(1, self._last + 1)]


def fuse_norms(network: nn.Module) -> None:
    """Replace the instance norms of a network. Those of timm's ResNets do the additions and ReLUs that follow them."""
    from timm.models.resnet import BasicBlock, Bottleneck, ResNet

    for name, module in list(network.named_modules()):
        if type(module) is nn.InstanceNorm2d and not (module.affine or module.track_running_stats):
            network.set_submodule(name, InstanceNorm(module.num_features, module.eps))
    for name, module in list(network.named_modules()):
        if type(module) in {BasicBlock, Bottleneck} and _is_plain(module):
            network.set_submodule(name, FusedBlock(module))
    if isinstance(network, ResNet) and isinstance(network.bn1, InstanceNorm) and type(network.act1) is nn.ReLU:
        network.bn1.relu, network.act1 = True, nn.Identity()


def _is_plain(block: nn.Module) -> bool:
    """Whether a residual block has instance norms and ReLU, and nothing between them."""
    parts = dict(block.named_children())
    norms = [part for name, part in parts.items() if name.startswith("bn")]
    activations = [part for name, part in parts.items() if name.startswith("act")]
    return (
        all(isinstance(norm, InstanceNorm) for norm in norms)
        and all(type(activation) is nn.ReLU for activation in activations)
        and isinstance(parts["drop_block"], nn.Identity)
        and parts.keys().isdisjoint({"se", "drop_path"})
    )

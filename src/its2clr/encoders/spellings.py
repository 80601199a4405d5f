"""How other libraries spell the names of a network's tensors, and the way back to timm's."""

import re
from collections.abc import Callable

Renaming = Callable[[str], str]

_SEQUENTIAL = {"0": "conv1", "1": "bn1", "4": "layer1", "5": "layer2", "6": "layer3", "7": "layer4"}
_VIT = (
    (r"^class_token$", "cls_token"),
    (r"^conv_proj\.", "patch_embed.proj."),
    (r"^encoder\.pos_embedding$", "pos_embed"),
    (r"^encoder\.ln\.", "norm."),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
    (r"\.ln_(\d)\.", r".norm\1."),
    (r"\.self_attention\.in_proj_", ".attn.qkv."),
    (r"\.self_attention\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.(?:0|linear_1)\.", ".mlp.fc1."),
    (r"\.mlp\.(?:3|linear_2)\.", ".mlp.fc2."),
)


def _same(name: str) -> str:
    return name


def _of_sequential(name: str) -> str:
    """`nn.Sequential(*resnet.children())`: relu and pooling take a number too, but hold no tensors."""
    first, dot, rest = name.partition(".")
    return f"{_SEQUENTIAL.get(first, first)}{dot}{rest}"


def _of_torchvision_vit(name: str) -> str:
    for pattern, replacement in _VIT:
        name = re.sub(pattern, replacement, name)
    return name


RENAMINGS: tuple[tuple[str, Renaming], ...] = (
    ("timm's names", _same),
    ("a ResNet as nn.Sequential", _of_sequential),
    ("torchvision's names of a ViT", _of_torchvision_vit),
)
"""Spellings of a network's names, each with the way back to timm's; the first of equals is taken."""

"""Put weights made elsewhere into an encoder: find out how the names in a file map to timm's, and report them all.

A name in a file is a prefix (what wrapped the network: `module.`, `state_dict.`, `encoder_q.`, `teacher.backbone.`) and
a name within the network. Every prefix that occurs is tried with every spelling, as it is and as timm's own converter
for the architecture changes it. What fits the most tensors, by name and shape, is taken.
"""

import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from its2clr.config import EncoderConfig
from its2clr.encoders.encoder import EmbeddingNetwork, image_size
from its2clr.encoders.weight_files import WeightFile, read_weights, with_constants
from its2clr.encoders.weights import create_network
from its2clr.errors import InputError
from its2clr.settings import parse_override, resolve_config
from its2clr.wording import shortened

_OPTIONAL = "num_batches_tracked"
_NAMES_SHOWN = 6
SPELLINGS: dict[str, dict[str, str]] = {
    "timm's names": {},
    "a ResNet as nn.Sequential": {  # 2 and 3 are relu and pooling, which hold no tensors
        r"^0\.": "conv1.",
        r"^1\.": "bn1.",
        r"^4\.": "layer1.",
        r"^5\.": "layer2.",
        r"^6\.": "layer3.",
        r"^7\.": "layer4.",
    },
    "torchvision's names of a ViT": {
        r"^class_token$": "cls_token",
        r"^conv_proj\.": "patch_embed.proj.",
        r"^encoder\.pos_embedding$": "pos_embed",
        r"^encoder\.ln\.": "norm.",
        r"^encoder\.layers\.encoder_layer_(\d+)\.": r"blocks.\1.",
        r"\.ln_(\d)\.": r".norm\1.",
        r"\.self_attention\.in_proj_": ".attn.qkv.",
        r"\.self_attention\.out_proj\.": ".attn.proj.",
        r"\.mlp\.(?:0|linear_1)\.": ".mlp.fc1.",
        r"\.mlp\.(?:3|linear_2)\.": ".mlp.fc2.",
    },
}
"""Spellings that timm's converters do not know: patterns in a name, and what they are in timm's."""


@dataclass(frozen=True)
class WeightReport:
    """What became of every tensor of a file.

    Attributes:
        source: The file.
        layout: How its names were understood.
        expected: Number of tensors of the encoder's backbone.
        matched: Those that the file has, by timm's name.
        missing: Those that it does not have.
        other_shape: Those that it has in another shape, and both shapes.
        resized: Those that timm resampled to the encoder's size.
        excess: Names in the file of layers that this backbone does not have.
        unused: Every other name in the file.
        share: Matched share of the backbone: of its tensors or of its numbers, whichever is less.
        projector: What became of a projection head.
        constants: Which normalisation constants hold, and why.
        notes: Advice.
    """

    source: str
    layout: str
    expected: int
    matched: tuple[str, ...]
    missing: tuple[str, ...]
    other_shape: tuple[str, ...]
    resized: tuple[str, ...]
    excess: tuple[str, ...]
    unused: tuple[str, ...]
    share: float
    projector: str
    constants: str
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """The report in words: counts, and the first names of each kind."""
        kinds = {
            "missing, left as they were": self.missing,
            "of another shape, not loaded": self.other_shape,
            "resized": self.resized,
            "of a part that the encoder does not have": self.excess,
            "unused": self.unused,
        }
        return [
            f"weights {self.source}, read as {self.layout}",
            f"  matched {len(self.matched)} of the encoder's {self.expected} tensors ({self.share:.1%} of it)",
            *(f"  {kind}: {len(names)}: {shortened(names, _NAMES_SHOWN)}" for kind, names in kinds.items() if names),
            f"  projection head: {self.projector}",
            f"  normalisation: {self.constants}",
            *(f"  note: {note}" for note in self.notes),
        ]

    def as_dict(self) -> dict[str, Any]:
        """For weights.json."""
        return dict(vars(self))


class Match(NamedTuple):
    """How a file fits a network: the report, and tensors by the names of backbone and projector."""

    report: WeightReport
    backbone: Mapping[str, Tensor]
    projector: Mapping[str, Tensor]


class _Reading(NamedTuple):
    """One way to understand a file.

    Attributes:
        prefix: What comes before the names of the network.
        layout: Prefix and spelling in words.
        tensors: Tensors by the names they would have in timm.
        names: What the file calls each.
        converted: Whether timm's converter for the architecture was applied.
    """

    prefix: str
    layout: str
    tensors: Mapping[str, Tensor]
    names: Mapping[str, str]
    converted: bool


def load_weights(network: EmbeddingNetwork, file: WeightFile, config: EncoderConfig) -> WeightReport:
    """Put the weights of a file into a network.

    Args:
        network: Encoder and projector; changed only if the weights fit.
        file: What was read.
        config: Settings of the encoder.

    Raises:
        InputError: The file is of another network, or fits too little of the backbone; with the report.
    """
    report, backbone, projector = match_weights(network, file, config)
    limit, kept = config.weights_matched, len(report.matched) / max(len(report.matched) + len(report.excess), 1)
    if min(report.share, kept) < limit:
        problem = (
            f"{report.share:.1%} of the encoder {config.name!r} is in the file"
            if report.share < limit
            else f"the encoder {config.name!r} takes {kept:.1%} of the network that is in the file"
        )
        heading = f"encoder.weights: these are not weights of this encoder: {problem}"
        asked = f"encoder.weights_matched={limit:g} asks for {limit:.0%}"
        raise InputError("\n".join([f"{heading}, {asked}", *report.lines()]))
    network.encoder.backbone.load_state_dict(dict(backbone), strict=False)
    network.head.load_state_dict(dict(projector), strict=False)
    return report


def report_weights(source: str, recipe: str | None = None, overrides: Sequence[str] = ()) -> WeightReport:
    """Say what would be loaded from a file with these settings; nothing is written.

    Raises:
        InputError: As `load_weights`.
    """
    file = read_weights(source)
    given = dict(parse_override(text) for text in overrides) | {"encoder.weights": source}
    config = with_constants(resolve_config(recipe, given), file=file)
    return load_weights(create_network(config), file, config.encoder)


def match_weights(network: EmbeddingNetwork, file: WeightFile, config: EncoderConfig) -> Match:
    """Find out what of a file fits a network; changes nothing."""
    backbone = network.encoder.backbone
    state = backbone.state_dict()
    groups = _by_prefix(file.tensors)
    reading = _best_reading(groups, file.tensors, backbone)
    head, projector = _find_projector(network.head.state_dict(), file.tensors, groups, reading.prefix)

    required = [name for name in state if not name.endswith(_OPTIONAL)]
    fitting = {name: tensor for name, tensor in reading.tensors.items() if _fits(name, tensor, state)}
    matched = tuple(name for name in required if name in fitting)
    missing = tuple(name for name in required if name not in reading.tensors)
    differing = [name for name in required if name in reading.tensors and name not in fitting]
    given = {name: file.tensors.get(reading.names[name], reading.tensors[name]) for name in (*matched, *differing)}
    resized = [name for name in matched if given[name].shape != state[name].shape]

    taken = set(head.values())
    left = {name: full for name, full in reading.names.items() if name not in state and full not in taken}
    parts = {name.partition(".")[0] for name in matched}
    excess = {k: v for k, v in left.items() if k.partition(".")[0] in parts and not k.endswith(_OPTIONAL)}
    outside = (full for full in file.tensors if not full.startswith(reading.prefix) and full not in taken)
    report = WeightReport(
        source=file.source,
        layout=reading.layout,
        expected=len(required),
        matched=matched,
        missing=missing,
        other_shape=tuple(
            f"{name} ({_size(given[name])} in the file, {_size(state[name])} in the encoder)" for name in differing
        ),
        resized=tuple(f"{name} {_size(given[name])} -> {_size(state[name])}" for name in resized),
        excess=tuple(excess.values()),
        unused=(*(full for name, full in left.items() if name not in excess), *outside),
        share=_share(matched, required, state),
        projector=projector,
        constants=_said_constants(file, config),
        notes=(
            *file.notes,
            *(_said_positions(given["pos_embed"], backbone) if resized == ["pos_embed"] else ()),
            *_advice(backbone, missing, {name: reading.tensors[name] for name in left}, matched, file, config),
        ),
    )
    return Match(report, fitting, {name: file.tensors[full] for name, full in head.items()})


def _by_prefix(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """For every dotted prefix: the names below it, without it, to the whole names."""
    groups: dict[str, dict[str, str]] = {"": {}}
    for name in names:
        for cut in (0, *(place.end() for place in re.finditer(r"\.", name))):
            groups.setdefault(name[:cut], {})[name[cut:]] = name
    return groups


def _best_reading(
    groups: Mapping[str, Mapping[str, str]], tensors: Mapping[str, Tensor], backbone: nn.Module
) -> _Reading:
    """The way to understand a file that fits the most tensors; of equals the one that changes least."""
    state = backbone.state_dict()

    def score(reading: _Reading) -> tuple[int, int, bool, int]:
        fitting = sum(_fits(name, tensor, state) for name, tensor in reading.tensors.items())
        return fitting, _preference(reading.prefix), not reading.converted, -len(reading.prefix)

    return max(_readings(groups, tensors, backbone), key=score)


def _readings(
    groups: Mapping[str, Mapping[str, str]], tensors: Mapping[str, Tensor], backbone: nn.Module
) -> Iterator[_Reading]:
    """Every prefix with every spelling, as it is and as timm converts it."""
    convert = getattr(sys.modules[type(backbone).__module__], "checkpoint_filter_fn", None)
    for prefix, below in groups.items():
        for spelling, rules in SPELLINGS.items():
            names = {_renamed(rest, rules): full for rest, full in below.items()}
            if rules and names.keys() == below.keys():
                continue  # nothing is spelled so
            renamed = {name: tensors[full] for name, full in names.items()}
            layout = f"{spelling} after {prefix!r}" if prefix else spelling
            yield _Reading(prefix, layout, renamed, names, converted=False)
            if convert is None:
                continue
            try:
                converted = convert(dict(renamed), backbone)
            except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
                continue  # the converter is made for other files
            origins = {id(tensor): names[name] for name, tensor in renamed.items()}
            found = {name: origins.get(id(tensor), names.get(name, name)) for name, tensor in converted.items()}
            yield _Reading(prefix, f"{layout}, converted by timm", converted, found, converted=True)


def _renamed(name: str, rules: Mapping[str, str]) -> str:
    for pattern, replacement in rules.items():
        name = re.sub(pattern, replacement, name)
    return name


def _fits(name: str, tensor: Tensor, state: Mapping[str, Tensor]) -> bool:
    return name in state and tensor.shape == state[name].shape


def _preference(prefix: str) -> int:
    """Of two copies of a network: the one that is meant to be used."""
    if re.search(r"teacher|ema\b|_ema|averaged", prefix):  # DINO, timm
        return 2
    return 0 if re.search(r"momentum|encoder_k|student|target", prefix) else 1  # MoCo, BYOL: the trained one


def _find_projector(
    state: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    groups: Mapping[str, Mapping[str, str]],
    backbone_prefix: str,
) -> tuple[dict[str, str], str]:
    """A projection head of our shape: its names to those in the file; and what to say about it."""
    required = {name for name in state if not name.endswith(_OPTIONAL)}
    linear = [_module(name) for name in state if state[name].ndim == 2]
    numbers = {"l1.": f"{linear[0]}.", "l2.": f"{linear[-1]}."}  # dsmil-wsi's
    found: dict[str, dict[str, str]] = {}
    others: list[tuple[int, int]] = []

    def nearness(prefix: str) -> tuple[int, int]:
        return len(os.path.commonprefix([prefix, backbone_prefix])), _preference(prefix)  # noqa: RUF071 (no paths)

    for prefix, below in groups.items():
        names = {numbers[rest[:3]] + rest[3:]: full for rest, full in below.items() if rest[:3] in numbers} or below
        same_names = {name for name in names if not name.endswith(_OPTIONAL)} == required
        if same_names and all(tensors[names[name]].shape == state[name].shape for name in required):
            found[prefix] = {name: full for name, full in names.items() if name in state}
        for first, last in (("l1.weight", "l2.weight"), ("fc.0.weight", "fc.2.weight")):
            if first in below and last in below:
                others.append((tensors[below[first]].shape[0], tensors[below[last]].shape[0]))
    if found:
        names = found[max(found, key=nearness)]
        return names, f"loaded from {_module(min(names.values()))} and the layers after it"
    if others:
        hidden, out = others[0]
        return {}, (
            f"that of the file does not fit and is not loaded; projector.hidden_dim={hidden} "
            f"projector.output_dim={out} projector.norm=none would take it"
        )
    return {}, "the file has none that fits; it starts anew"


def _share(matched: Iterable[str], required: Iterable[str], state: Mapping[str, Tensor]) -> float:
    """The lesser of the shares of tensors and of numbers: all convolutions without their norms are not a network."""
    sizes, expected = ([state[name].numel() for name in names] for names in (matched, required))
    return min(len(sizes) / len(expected), sum(sizes) / sum(expected))


def _said_positions(given: Tensor, backbone: nn.Module) -> list[str]:
    """That position embeddings alone were resampled, and which option takes them as they are."""
    patch, side = (int(getattr(backbone.patch_embed, name)[0]) for name in ("patch_size", "grid_size"))
    prefix_tokens = 0 if getattr(backbone, "no_embed_class", False) else getattr(backbone, "num_prefix_tokens", 1)
    old = math.isqrt(given.shape[1] - prefix_tokens)
    if given.ndim != 3 or old == side:  # SAM lays them out in two dimensions
        return []
    said = (
        f"the file's position embeddings, of {old} x {old} patches (images of {old * patch} px), are resampled "
        f"to the {side} x {side} ({side * patch} px) that this encoder is built for"
    )
    if getattr(backbone, "dynamic_img_size", False):
        return [f"{said}, and again for tiles of another size; encoder.options.img_size={old * patch} spares the first"]
    return [f"{said}; encoder.options.img_size={old * patch} would take them as they are, for tiles of that size"]


def _advice(
    backbone: nn.Module,
    missing: tuple[str, ...],
    left: Mapping[str, Tensor],
    matched: tuple[str, ...],
    file: WeightFile,
    config: EncoderConfig,
) -> list[str]:
    """Settings that would make the file fit, where the cause is known."""
    kinds = {name: type(module) for name, module in backbone.named_modules()}
    of_norms = [name for name in missing if issubclass(kinds[_module(name)], nn.modules.batchnorm._BatchNorm)]  # noqa: SLF001
    advice = []
    if missing and matched and len(of_norms) == len(missing) > len(matched):
        advice.append("the file has no normalisation layers, its network used instance norm: set encoder.norm=instance")
    if any(issubclass(kinds.get(_module(name), nn.Module), nn.InstanceNorm2d) for name in left):
        advice.append("the file has weights of normalisation layers, instance norm has none: set encoder.norm=batch")
    if file.architecture is not None and file.architecture.partition(".")[0] != config.name.partition(".")[0]:
        advice.append(f"the file says it is {file.architecture!r}: set encoder.name={file.architecture}")
    if any(name.endswith(".ls1.gamma") for name in left):
        advice.append("the file has layer scale: set encoder.options={init_values: 1.0e-5}; any value will do")
    if "reg_token" in left:
        count = left["reg_token"].shape[1]
        advice.append(f"the file has {count} register tokens: set encoder.options={{reg_tokens: {count}}}")
    named = {key: value for key, value in file.options.items() if config.options.get(key) != value}
    size = named.get("img_size")
    built_so = (size, size) if isinstance(size, int) else tuple(size or ())
    if "pos_embed" in matched or built_so == image_size(backbone):  # it is so, or was resampled
        named.pop("img_size", None)
    if named:
        listed = ", ".join(f"{key}: {json.dumps(value)}" for key, value in named.items())
        advice.append(f"the file names options that are not set: encoder.options={{{listed}}}")
    return advice


def _said_constants(file: WeightFile, config: EncoderConfig) -> str:
    ours = f"mean {_rounded(config.mean)}, std {_rounded(config.std)}"
    if file.constants is None:
        return f"the file does not say; encoder.mean and encoder.std stay: {ours}"
    mean, std, origin = file.constants
    if torch.allclose(torch.tensor([*mean, *std]), torch.tensor([*config.mean, *config.std]), atol=1e-6):
        return f"{ours}, from {origin}"
    return f"as set: {ours}; that differs from {origin}: mean {_rounded(mean)}, std {_rounded(std)}"


def _rounded(values: Iterable[float]) -> str:
    return "(" + ", ".join(f"{value:.4g}" for value in values) + ")"


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _size(tensor: Tensor) -> str:
    return "x".join(str(side) for side in tensor.shape) or "scalar"

"""Put weights made elsewhere into a network: find out how their names map to timm's, and report every key.

A name in a file is a prefix (what wrapped the network: `module.`, `state_dict.`, `encoder_q.`, `teacher.backbone.`),
then a name of the network, in one of a few spellings. Every prefix that occurs is tried with every spelling; the pair
that fits the most tensors by name and shape is taken.
"""

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from its2clr.config import EncoderConfig
from its2clr.encoders.encoder import EmbeddingNetwork, image_size
from its2clr.encoders.spellings import RENAMINGS, Renaming
from its2clr.encoders.weight_files import WeightFile, read_weights, with_constants
from its2clr.encoders.weight_report import WeightReport
from its2clr.encoders.weights import create_network
from its2clr.errors import InputError
from its2clr.settings import parse_override, resolve_config

_OPTIONAL = "num_batches_tracked"


@dataclass(frozen=True, eq=False)
class Match:
    """How a file fits a network: the report, and tensors by the names of backbone and projector."""

    report: WeightReport
    backbone: Mapping[str, Tensor]
    projector: Mapping[str, Tensor]


def load_weights(network: EmbeddingNetwork, file: WeightFile, config: EncoderConfig) -> WeightReport:
    """Put the weights of a file into a network.

    Args:
        network: Encoder and projector; changed only if the weights fit.
        file: What was read.
        config: Settings of the encoder.

    Raises:
        InputError: The file fits too little of the backbone, or is of another network; with the report of the keys.
    """
    match = match_weights(network, file, config)
    check_match(match.report, config)
    for module, tensors in ((network.encoder.backbone, match.backbone), (network.head, match.projector)):
        module.load_state_dict(dict(tensors), strict=False)
    return match.report


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
    """Find out what of a file fits a network, if need be after timm's own conversion; changes nothing."""
    match = _match(network, file, config)
    fits = match.report.share >= config.weights_matched and not match.report.other_shape
    converted = None if fits else _converted_by_timm(network.encoder.backbone, file)
    if converted is not None:
        other = _match(network, converted, config)
        if other.report.share > match.report.share:
            return replace(other, report=replace(other.report, layout=f"{other.report.layout}, converted by timm"))
    return match


def _converted_by_timm(backbone: nn.Module, file: WeightFile) -> WeightFile | None:
    """The file as the architecture's own code in timm turns weights of its authors into timm's; None if it does not."""
    convert = getattr(sys.modules[type(backbone).__module__], "checkpoint_filter_fn", None)
    if convert is None:
        return None
    try:
        return replace(file, tensors=convert(dict(file.tensors), backbone))
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, RuntimeError, AssertionError):
        return None  # made for other files than this


def _match(network: EmbeddingNetwork, file: WeightFile, config: EncoderConfig) -> Match:
    backbone = network.encoder.backbone
    state = backbone.state_dict()
    groups = _by_prefix(file.tensors)
    prefix, spelling, names = _best(groups, backbone, file.tensors)
    renamed = {spelling[1](rest): full for rest, full in groups[prefix].items()}
    tensors, resized, notes = {}, [], list(file.notes)
    for name, full in names.items():
        tensor = file.tensors[full]
        if tensor.shape != state[name].shape:
            tensor = _resampled(tensor, backbone)
            resized.append(f"{name} {_size(file.tensors[full])} -> {_size(tensor)}")
            notes.append(_said_positions(file.tensors[full], backbone))
        tensors[name] = tensor
    head, projector = _find_projector(network.head.state_dict(), file.tensors, groups, prefix)
    required = [name for name in state if not name.endswith(_OPTIONAL)]
    matched = tuple(name for name in required if name in tensors)
    missing = tuple(name for name in required if name not in tensors and name not in renamed)
    differing = {name: renamed[name] for name in required if name not in tensors and name in renamed}
    other = tuple(
        f"{name} ({_size(file.tensors[full])} in the file, {_size(state[name])} in the encoder)"
        for name, full in differing.items()
    )
    parts = {name.partition(".")[0] for name in matched}
    used = {*names.values(), *head.values(), *differing.values()}
    left = {name: full for name, full in renamed.items() if full not in used}
    excess = tuple(
        full for name, full in left.items() if name.partition(".")[0] in parts and not name.endswith(_OPTIONAL)
    )
    report = WeightReport(
        source=file.source,
        layout=f"{spelling[0]}{f' after {prefix!r}' if prefix else ''}",
        expected=len(required),
        matched=matched,
        missing=missing,
        other_shape=other,
        resized=tuple(resized),
        excess=excess,
        unused=tuple(name for name in file.tensors if name not in used and name not in excess),
        share=_share(matched, required, state),
        projector=projector,
        constants=_said_constants(file, config),
        notes=(*notes, *_advice(backbone, missing, left, matched, file, config)),
    )
    return Match(report, tensors, {name: file.tensors[full] for name, full in head.items()})


def check_match(report: WeightReport, config: EncoderConfig) -> None:
    """Refuse weights that are not those of this encoder.

    Raises:
        InputError: With the report.
    """
    limit = config.weights_matched
    asked = f"encoder.weights_matched={limit:g} asks for {limit:.0%}"
    kept = len(report.matched) / max(len(report.matched) + len(report.excess), 1)
    if report.share < limit:
        problem = f"{report.share:.1%} of the encoder {config.name!r} is in it, {asked}"
    elif kept < limit:
        problem = f"the encoder {config.name!r} takes {kept:.1%} of the network that is in it, {asked}"
    else:
        return
    raise InputError("\n".join([f"encoder.weights: these are not weights of this encoder: {problem}", *report.lines()]))


def _by_prefix(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """For every dotted prefix: the names below it, without it, to the whole names."""
    groups: dict[str, dict[str, str]] = {"": {}}
    for name in names:
        cuts = [0, *(place.end() for place in re.finditer(r"\.", name))]
        for cut in cuts:
            groups.setdefault(name[:cut], {})[name[cut:]] = name
    return groups


def _best(
    groups: Mapping[str, Mapping[str, str]], backbone: nn.Module, tensors: Mapping[str, Tensor]
) -> tuple[str, tuple[str, Renaming], dict[str, str]]:
    """Prefix and spelling that fit the most tensors, and those: timm's name to the name in the file."""
    state = backbone.state_dict()
    best: tuple[str, tuple[str, Renaming], dict[str, str]] = "", RENAMINGS[0], {}
    best_score: tuple[int, int, int] = (0, 0, 0)
    for spelling in RENAMINGS:
        for prefix, below in groups.items():
            found = {}
            for rest, full in below.items():
                name, tensor = spelling[1](rest), tensors[full]
                if name in state and (tensor.shape == state[name].shape or _can_resample(name, tensor, backbone)):
                    found[name] = full
            score = (len(found), _preference(prefix), -len(prefix))
            if found and score > best_score:
                best, best_score = (prefix, spelling, found), score
    return best


def _preference(prefix: str) -> int:
    """Of two copies of a network: that which is meant to be used."""
    if re.search(r"teacher|ema\b|_ema|averaged", prefix):  # DINO, timm
        return 2
    return 0 if re.search(r"momentum|encoder_k|student|target", prefix) else 1  # MoCo, BYOL: the trained one


def _prefix_tokens(backbone: nn.Module) -> int:
    """Tokens of a ViT that have a position embedding but no place."""
    return 0 if getattr(backbone, "no_embed_class", False) else int(getattr(backbone, "num_prefix_tokens", 1))


def _can_resample(name: str, tensor: Tensor, backbone: nn.Module) -> bool:
    """Whether these are position embeddings of a square grid of patches, of another size than the backbone's."""
    wanted = getattr(backbone, "pos_embed", None)
    if name != "pos_embed" or wanted is None or not hasattr(getattr(backbone, "patch_embed", None), "grid_size"):
        return False
    patches = tensor.shape[1] - _prefix_tokens(backbone) if tensor.ndim == wanted.ndim == 3 else 0
    return patches > 0 and tensor.shape[2] == wanted.shape[2] and math.isqrt(patches) ** 2 == patches


def _resampled(tensor: Tensor, backbone: nn.Module) -> Tensor:
    """Position embeddings interpolated to the backbone's grid, as timm does."""
    from timm.layers.pos_embed import resample_abs_pos_embed

    grid = list(backbone.patch_embed.grid_size)  # type: ignore[union-attr, arg-type]
    resampled: Tensor = resample_abs_pos_embed(tensor, grid, num_prefix_tokens=_prefix_tokens(backbone))
    return resampled


def _said_positions(tensor: Tensor, backbone: nn.Module) -> str:
    """What happens to position embeddings that are resampled, and which option takes them as they are."""
    patch, side = (int(getattr(backbone.patch_embed, name)[0]) for name in ("patch_size", "grid_size"))
    given = math.isqrt(tensor.shape[1] - _prefix_tokens(backbone))
    said = (
        f"the file's position embeddings, of {given} x {given} patches (images of {given * patch} px), are resampled "
        f"to the {side} x {side} ({side * patch} px) that this encoder is built for"
    )
    if getattr(backbone, "dynamic_img_size", False):
        return f"{said}, and again for tiles of another size; encoder.options.img_size={given * patch} spares the first"
    return f"{said}; encoder.options.img_size={given * patch} would take them as they are, for tiles of that size"


def _find_projector(
    state: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    groups: Mapping[str, Mapping[str, str]],
    backbone_prefix: str,
) -> tuple[dict[str, str], str]:
    """A projection head of our shape: its names to those in the file; and what is to be said about it."""
    required = {name for name in state if not name.endswith(_OPTIONAL)}
    linear = [_module(name) for name in state if state[name].ndim == 2]
    numbered = {"l1": linear[0], "l2": linear[-1]} if linear else {}
    found, others = [], []
    for prefix, below in groups.items():
        layers = {rest: full for rest, full in below.items() if rest.partition(".")[0] in numbered}
        for names in (below, {f"{numbered[k.partition('.')[0]]}.{k.partition('.')[2]}": v for k, v in layers.items()}):
            same_names = {name for name in names if not name.endswith(_OPTIONAL)} == required
            if same_names and all(tensors[names[name]].shape == state[name].shape for name in required):
                found.append((prefix, {name: full for name, full in names.items() if name in state}))
        for first, last in (("l1.weight", "l2.weight"), ("fc.0.weight", "fc.2.weight")):
            if first in below and last in below:
                others.append((tensors[below[first]].shape[0], tensors[below[last]].shape[0]))
    if found:
        prefix, names = max(found, key=lambda one: (_common(one[0], backbone_prefix), _preference(one[0])))
        return names, f"loaded from {sorted(names.values())[0].rsplit('.', 1)[0]} and the layers after it"
    if others:
        hidden, out = others[0]
        return {}, (
            f"that of the file does not fit and is not loaded; projector.hidden_dim={hidden} "
            f"projector.output_dim={out} projector.norm=none would take it"
        )
    return {}, "none in the file that fits; it starts anew"


def _common(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _share(matched: Iterable[str], required: Iterable[str], state: Mapping[str, Tensor]) -> float:
    """The lesser of the shares of tensors and of numbers: all convolutions without their norms are not a network."""
    sizes, expected = ([state[name].numel() for name in names] for names in (matched, required))
    return min(len(sizes) / len(expected), sum(sizes) / sum(expected))


def _advice(
    backbone: nn.Module,
    missing: tuple[str, ...],
    left: Mapping[str, str],
    matched: tuple[str, ...],
    file: WeightFile,
    config: EncoderConfig,
) -> list[str]:
    kinds = {name: type(module) for name, module in backbone.named_modules()}
    of_norms = [name for name in missing if issubclass(kinds[_module(name)], nn.modules.batchnorm._BatchNorm)]  # noqa: SLF001
    advice = []
    if missing and matched and len(of_norms) == len(missing) > len(matched):
        advice.append("the file has no normalisation layers, its network used instance norm: set encoder.norm=instance")
    if any(issubclass(kinds.get(_module(name), nn.Module), nn.InstanceNorm2d) for name in left):
        advice.append(
            "the file has weights of normalisation layers, which instance norm has not: set encoder.norm=batch"
        )
    if file.architecture is not None and file.architecture.partition(".")[0] != config.name.partition(".")[0]:
        advice.append(f"the file says it is {file.architecture!r}: set encoder.name={file.architecture}")
    if any(name.endswith(".ls1.gamma") for name in left):
        advice.append("the file has layer scale: set encoder.options={init_values: 1.0e-5}; the value does not matter")
    if "reg_token" in left:
        count = file.tensors[left["reg_token"]].shape[1]
        advice.append(f"the file has {count} register tokens: set encoder.options={{reg_tokens: {count}}}")
    named = {key: value for key, value in file.options.items() if config.options.get(key) != value}
    if "pos_embed" in matched or _pair(named.get("img_size")) == image_size(backbone):  # it is so, or was resampled
        named.pop("img_size", None)
    if named:
        listed = ", ".join(f"{key}: {json.dumps(value)}" for key, value in named.items())
        advice.append(f"the file names options that are not set: encoder.options={{{listed}}}")
    return advice


def _pair(size: Any) -> Any:
    return (size, size) if isinstance(size, int) else tuple(size or ())


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

"""Weights and normalisation constants as they lie in files: safetensors, torch, timm's folders and hub, our own.

No code of a file is ever run: torch files are read with `weights_only=True`.
"""

import argparse
import json
import pickle
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from its2clr.archive import read_archive
from its2clr.config import HUB_PREFIXES, EncoderConfig, RunConfig
from its2clr.errors import InputError
from its2clr.files import read_json

HUB_FILES = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth")
"""Names of the weights in a folder of timm's hub layout, the best first."""
_MODEL_PARTS = ("model.json", "encoder.safetensors", "aggregators.safetensors")
_NOT_WEIGHTS = ("optimi", "lr_sched")
"""How the names of states of an optimiser or scheduler begin."""


class Constants(NamedTuple):
    """Normalisation constants, and who says so."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    origin: str


@dataclass(frozen=True, eq=False)
class WeightFile:
    """What a file of weights holds.

    Attributes:
        source: File or hub name.
        tensors: Every tensor by dotted name; the keys of wrapping dictionaries are part of the name.
        constants: Normalisation constants that come with the weights, or None.
        architecture: timm's name of the network, where the file says it.
        options: Its arguments, where the file says them.
        notes: What a user should know about such files.
    """

    source: str
    tensors: Mapping[str, Tensor]
    constants: Constants | None = None
    architecture: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_weights(source: str | Path) -> WeightFile:
    """Read a file, a folder in timm's hub layout, or a hub name (`hf-hub:owner/name`).

    Raises:
        InputError: There is nothing, it is damaged, holds no tensors, or needs unpickling.
    """
    source = str(source)
    if source.startswith(HUB_PREFIXES):
        return _read_hub(source)
    path = Path(source)
    if path.is_dir():
        path = _file_of_folder(path)
    if not path.is_file():
        raise InputError(
            f"encoder.weights: {source} is not there; give a file, a folder, or a hub name: hf-hub:OWNER/NAME"
        )
    found = _read_file(path, source)
    if not found.tensors:
        raise InputError(f"encoder.weights: {source} holds no tensors")
    return found


def with_constants(config: RunConfig, begun: RunConfig | None = None, file: WeightFile | None = None) -> RunConfig:
    """Settings whose `encoder.mean` and `encoder.std` are those of the weights it starts from, unless they were set.

    Args:
        config: Settings as given.
        begun: Settings of the run, if it has begun: then its constants stay.
        file: The weights, where they are read already.
    """
    encoder = config.encoder
    wanted = {"mean", "std"} - encoder.model_fields_set
    if not wanted or (encoder.weights is None and not encoder.pretrained):
        return config
    found: Constants | EncoderConfig | None
    if begun is not None and _start(begun.encoder) == _start(encoder):
        found = begun.encoder
    elif encoder.weights is not None:
        found = (file or read_weights(encoder.weights)).constants
    else:
        found = _constants_of_timm(encoder.name)
    if found is None:
        return config
    changed = encoder.model_copy(update={name: getattr(found, name) for name in sorted(wanted)})
    return config.model_copy(update={"encoder": changed})


def _start(config: EncoderConfig) -> tuple[Any, ...]:
    return config.name, config.weights, config.pretrained


def _read_file(path: Path, source: str) -> WeightFile:
    with path.open("rb") as file:
        start = file.read(9)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            ours = _MODEL_PARTS[0] in archive.namelist()
        return _read_model(path, source) if ours else _read_torch(path, source)
    return _read_safetensors(path, source) if start[8:] == b"{" else _read_torch(path, source)


def _read_safetensors(path: Path, source: str) -> WeightFile:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise InputError(f"encoder.weights: {source} is not a readable safetensors file ({error})") from error
    if "state" in metadata:  # ours: `engine/checkpoint.py`
        encoder = json.loads(metadata["state"]).get("encoder", {})
        _refuse_adapter(source, tensors, "checkpoint" if encoder else "training state")
        weights = {k: v for k, v in tensors.items() if k not in {"encoder.mean", "encoder.std"}}
        return _described(source, _weights(weights), _constants(encoder, "the checkpoint of its2clr"))
    told = {key: _parsed(value) for key, value in metadata.items()}
    constants = _constants(told, "the file") or _constants(told.get("pretrained_cfg"), "the file")
    return _described(source, _weights(tensors), constants, path)


def _read_torch(path: Path, source: str) -> WeightFile:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # arguments of training scripts; only values
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"encoder.weights: {source} cannot be read as plain tensors{_needed_code(path)}. Reading it would run code "
            "of the file, which its2clr never does. Where you trust it, keep its tensors only: "
            "`torch.save(torch.load(FILE, weights_only=False)['state_dict'], NEW)`, or of a whole module "
            "`torch.save(module.state_dict(), NEW)`"
        ) from error
    except (RuntimeError, EOFError, ValueError, OSError, KeyError) as error:
        raise InputError(f"encoder.weights: {source} is damaged, or no file of weights ({error})") from error
    return _described(source, _weights(_flattened(content)), None, path)


def _needed_code(path: Path) -> str:
    try:
        needed = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError):
        return ""
    return f" (it asks for {', '.join(needed[:3])})" if needed else ""


def _read_model(path: Path, source: str) -> WeightFile:
    parts = read_archive(path, _MODEL_PARTS, "copy it again")
    try:
        encoder = json.loads(parts["model.json"])["encoder"]
        tensors = load(parts["encoder.safetensors"])
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise InputError(f"encoder.weights: {source} is damaged ({error})") from error
    _refuse_adapter(source, tensors, "model")
    weights = {name: tensor for name, tensor in tensors.items() if name not in {"mean", "std"}}
    return WeightFile(
        source, weights, _constants(encoder, "the model of its2clr"), encoder.get("name"), encoder["options"]
    )


def _refuse_adapter(
    source: str, tensors: Mapping[str, Tensor], kind: Literal["model", "checkpoint", "training state"]
) -> None:
    """Say of a file of ours that holds an adapter over features what it is, and what to do with it.

    Raises:
        InputError: It does.
    """
    for prefix in ("", "encoder.", "network.encoder."):
        hidden, output = (tensors.get(f"{prefix}{layer}.weight") for layer in ("hidden", "output"))
        if hidden is not None and output is not None and hidden.shape == output.shape[::-1]:
            break
    else:
        return
    refined = source if kind == "checkpoint" else "RUN/checkpoints/encoder-refined.safetensors"
    raise InputError(
        f"encoder.weights: {source} is the {kind} of an adapter over features made elsewhere: it takes "
        f"{hidden.shape[1]} features per tile and holds no network for tiles, so no encoder can start from it.\n"
        f"  to predict bags of such features: its2clr predict {source if kind == 'model' else 'RUN'} FEATURES\n"
        f"  to refine it further: its2clr fit COHORT_OF_FEATURES --out NEW --set pretrain.start={refined}\n"
        "  to train on tiles: give the weights of the encoder that made the features"
    )


def _read_hub(source: str) -> WeightFile:
    from timm.models import load_model_config_from_hf, load_state_dict_from_hf

    name = source.partition(":")[2]
    try:
        config, architecture, options = load_model_config_from_hf(name)
        file = {"filename": config["hf_hub_filename"]} if config.get("hf_hub_filename") else {}
        content = load_state_dict_from_hf(name, weights_only=True, **file)
    except (OSError, RuntimeError, ValueError, KeyError, AssertionError, pickle.UnpicklingError) as error:
        raise InputError(
            f"encoder.weights: timm cannot get {source}: {error}. Is the name right, and may this machine reach the "
            "hub? A folder with config.json and model.safetensors, copied from there, can be given instead"
        ) from error
    return WeightFile(source, _weights(_flattened(content)), _constants(config, "timm's config"), architecture, options)


def _file_of_folder(folder: Path) -> Path:
    if (folder / "config.yaml").is_file():
        raise InputError(
            f"encoder.weights: {folder} is a run; name one of its files, checkpoints/encoder-refined.safetensors, or "
            "give the run as pretrain.start to take its encoder with all settings"
        )
    for name in HUB_FILES:
        if (folder / name).is_file():
            return folder / name
    raise InputError(f"encoder.weights: {folder} has none of {', '.join(HUB_FILES)}; name the file itself")


def _described(
    source: str, tensors: dict[str, Tensor], constants: Constants | None, path: Path | None = None
) -> WeightFile:
    """A file with what its neighbour `config.json` or its layout says about it."""
    architecture: str | None = None
    options: Mapping[str, Any] = {}
    notes: tuple[str, ...] = ()
    if path is not None and path.name in HUB_FILES and (path.parent / "config.json").is_file():
        try:
            document = read_json(path.parent / "config.json")
        except ValueError as error:
            raise InputError(f"{path.parent / 'config.json'}: not valid JSON ({error})") from error
        architecture, options = document.get("architecture"), document.get("model_args", {})
        constants = constants or _constants(document.get("pretrained_cfg", document), "timm's config beside it")
    if constants is None and (project := released_with(tensors)) is not None:
        constants = Constants((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), f"the layout: {project} normalises no tiles")
        if project == "ItS2CLR":
            notes = (
                "the released ItS2CLR code trained on BGR images: see the guide on weights if this is such a file",
            )
    return WeightFile(source, tensors, constants, architecture, options, notes)


def released_with(names: Collection[str]) -> str | None:
    """The research code that writes such names, whose networks see tiles in [0, 1] as they are; None for others."""
    for name in names:
        before, first, rest = name.rpartition("conv1.weight")
        if name.endswith("features.0.weight") and name.replace("features.0.", "l1.") in names:
            return "dsmil-wsi"
        if not first or rest or f"{before}bn1.weight" in names:
            continue
        if before.endswith("feature_extractor."):  # embedder.pth, as compute_feats.py writes it
            return "dsmil-wsi"
        if before.endswith("resnet.") and f"{before}fc.0.weight" in names:
            return "ItS2CLR"
    return None


def _constants_of_timm(name: str) -> Constants | None:
    import timm

    config = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    return None if config is None else _constants(vars(config), "timm")


def _constants(document: Any, origin: str) -> Constants | None:
    if not isinstance(document, Mapping):
        return None
    values = []
    for key in ("mean", "std"):
        given = document.get(key)
        if not isinstance(given, list | tuple) or len(given) != 3:
            return None
        values.append((float(given[0]), float(given[1]), float(given[2])))
    return Constants(values[0], values[1], origin)


def _weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(_NOT_WEIGHTS)}


def _flattened(content: Any, prefix: str = "") -> dict[str, Tensor]:
    """Every tensor of nested dictionaries by dotted name."""
    if isinstance(content, Tensor):
        return {prefix.removesuffix("."): content.detach()}
    flat: dict[str, Tensor] = {}
    if isinstance(content, Mapping):
        for key, value in content.items():
            flat |= _flattened(value, f"{prefix}{key}.")
    return flat


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text

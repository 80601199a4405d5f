"""Weights and normalisation constants as they lie in files: safetensors, torch, timm's folders and hub, our own.

No code of a file is ever run: torch files are read with `weights_only=True`.
"""

import argparse
import json
import pickle
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from its2clr.archive import read_archive
from its2clr.config import HUB_PREFIXES, EncoderConfig, RunConfig
from its2clr.engine.checkpoint import read_safetensors
from its2clr.errors import InputError
from its2clr.files import damage_said, read_json
from its2clr.settings import flatten

HUB_FILES = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth")
"""Names of the weights in a folder of timm's hub layout, the best first."""
_MODEL_PARTS = ("model.json", "encoder.safetensors", "aggregators.safetensors")
_NOT_WEIGHTS = ("optimi", "lr_sched")
"""How the names of states of an optimiser or scheduler begin."""
Kind = Literal["model", "checkpoint", "training state"]
BGR_NOTE = "the released ItS2CLR code trained on BGR images: see the guide on weights if this is such a file"


class Constants(NamedTuple):
    """Normalisation constants, and where they are from."""

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
    try:
        with damage_said(f"{source} cannot be read as weights"):
            file = _read_hub(source) if source.startswith(HUB_PREFIXES) else _read_path(Path(source), source)
    except InputError as error:
        raise InputError(f"encoder.weights: {error}") from error
    tensors = {name: tensor for name, tensor in file.tensors.items() if not name.startswith(_NOT_WEIGHTS)}
    if not tensors:
        raise InputError(f"encoder.weights: {source} holds no tensors")
    return replace(file, tensors=tensors)


def with_constants(config: RunConfig, begun: RunConfig | None = None, file: WeightFile | None = None) -> RunConfig:
    """Settings with `encoder.mean` and `encoder.std` of the weights that the encoder starts from, unless they were set.

    Args:
        config: Settings as given.
        begun: Settings of the run, if it has begun: its constants then stay.
        file: The weights, if they were read already.
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


def _read_path(path: Path, source: str) -> WeightFile:
    if path.is_dir():
        path = _file_of_folder(path)
    if not path.is_file():
        raise InputError(f"{source} is not there; give a file, a folder, or a hub name: hf-hub:OWNER/NAME")
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if _MODEL_PARTS[0] in archive.namelist():
                return _read_model(path, source)
    with path.open("rb") as file:
        start = file.read(9)
    tensors, metadata = read_safetensors(path) if start[8:] == b"{" else (_read_torch(path, source), {})
    if "state" in metadata:
        encoder = json.loads(metadata["state"]).get("encoder", {})
        return _of_its2clr(source, tensors, encoder, "checkpoint" if encoder else "training state")
    return _read_others(path, source, tensors, metadata)


def _read_others(path: Path, source: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> WeightFile:
    """A file made elsewhere, with what its metadata, a `config.json` beside it or its layout say about it."""
    beside, document = path.with_name("config.json"), {}
    if path.name in HUB_FILES and beside.is_file():
        try:
            document = read_json(beside)
        except ValueError as error:
            raise InputError(f"{beside} is not valid JSON ({error})") from error
    told = {key: _parsed(value) for key, value in metadata.items()}
    constants = (
        _constants(told, "the file")
        or _constants(told.get("pretrained_cfg"), "the file")
        or _constants(document.get("pretrained_cfg", document), "timm's config beside it")
    )
    project = None if constants else released_with(tensors)
    if project is not None:
        constants = Constants((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), f"the layout: {project} normalises no tiles")
    return WeightFile(
        source,
        tensors,
        constants,
        document.get("architecture"),
        document.get("model_args", {}),
        (BGR_NOTE,) if project == "ItS2CLR" else (),
    )


def _read_torch(path: Path, source: str) -> dict[str, Tensor]:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # arguments of training scripts; only values
            return _tensors(torch.load(path, map_location="cpu", weights_only=True))
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{source} cannot be read as plain tensors{_needed_code(path)}. Reading it would run code of the file, "
            "which its2clr never does. If you trust the file, save its tensors alone: "
            "`torch.save(torch.load(FILE, weights_only=False)['state_dict'], NEW)`, or of a whole module "
            "`torch.save(module.state_dict(), NEW)`"
        ) from error
    except (RuntimeError, EOFError, ValueError, OSError, KeyError) as error:
        raise InputError(f"{source} is damaged, or no file of weights ({error})") from error


def _needed_code(path: Path) -> str:
    try:
        needed = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError):
        return ""
    return f" (it asks for {', '.join(needed[:3])})" if needed else ""


def _read_model(path: Path, source: str) -> WeightFile:
    parts = read_archive(path, _MODEL_PARTS, "copy it again")
    try:
        encoder, tensors = json.loads(parts["model.json"])["encoder"], load(parts["encoder.safetensors"])
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise InputError(f"{source} is damaged ({error})") from error
    return _of_its2clr(source, tensors, encoder, "model")


def _of_its2clr(source: str, tensors: Mapping[str, Tensor], encoder: Mapping[str, Any], kind: Kind) -> WeightFile:
    _refuse_adapter(source, tensors, kind)
    constants = {f"{prefix}{name}" for prefix in ("", "encoder.") for name in ("mean", "std")}
    weights = {name: tensor for name, tensor in tensors.items() if name not in constants}
    found = _constants(encoder, f"the {kind} of its2clr")
    return WeightFile(source, weights, found, encoder.get("name"), encoder.get("options", {}))


def _refuse_adapter(source: str, tensors: Mapping[str, Tensor], kind: Kind) -> None:
    """Refuse a file of ours that holds an adapter over features; the message says what to do with it."""
    for prefix in ("", "encoder.", "network.encoder."):
        hidden, output = (tensors.get(f"{prefix}{layer}.weight") for layer in ("hidden", "output"))
        if hidden is not None and output is not None and hidden.shape == output.shape[::-1]:
            break
    else:
        return
    refined = source if kind == "checkpoint" else "RUN/checkpoints/encoder-refined.safetensors"
    raise InputError(
        f"{source} is the {kind} of an adapter over features made elsewhere: it takes {hidden.shape[1]} features per "
        "tile and holds no network for tiles, so no encoder can start from it.\n"
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
            f"timm cannot get {source}: {error}. Is the name right, and can this machine reach the hub? A folder with "
            "config.json and model.safetensors, copied from there, can be given instead"
        ) from error
    return WeightFile(source, _tensors(content), _constants(config, "timm's config"), architecture, options)


def _file_of_folder(folder: Path) -> Path:
    if (folder / "config.yaml").is_file():
        raise InputError(
            f"{folder} is a run; name a file of it, such as checkpoints/encoder-refined.safetensors, or give the run "
            "as pretrain.start to take its encoder with all settings"
        )
    for name in HUB_FILES:
        if (folder / name).is_file():
            return folder / name
    raise InputError(f"{folder} has none of {', '.join(HUB_FILES)}; name the file itself")


def released_with(names: Collection[str]) -> str | None:
    """The research code that writes such names and gives its network tiles in [0, 1] as they are; None for others."""
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
    given: list[Any] = [document.get(key) for key in ("mean", "std")] if isinstance(document, Mapping) else [None]
    if not all(isinstance(values, list | tuple) and len(values) == 3 for values in given):
        return None
    mean, std = (tuple(map(float, values)) for values in given)
    return Constants(mean, std, origin)  # type: ignore[arg-type]


def _tensors(content: Any) -> dict[str, Tensor]:
    """Every tensor of nested dictionaries by dotted name."""
    values = flatten(content) if isinstance(content, Mapping) else {}
    return {name: value.detach() for name, value in values.items() if isinstance(value, Tensor)}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text

"""Checkpoints: one safetensors file with the tensors and a JSON state, never a pickle."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from its2clr.errors import InputError
from its2clr.files import atomic_path, damage_said
from its2clr.signals import interrupts_wait


def save_checkpoint(path: str | Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write tensors and a JSON state to one file that is never half-written."""
    contiguous = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    needs = sum(tensor.nbytes for tensor in contiguous.values())
    with interrupts_wait(), atomic_path(path, needs) as temporary:
        save_file(contiguous, temporary, metadata={"state": json.dumps(state)})


def load_checkpoint(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_checkpoint` wrote.

    Raises:
        InputError: The file is missing, damaged, or not a checkpoint of its2clr.
    """
    if not Path(path).is_file():
        raise InputError(f"{path}: no such checkpoint")
    tensors, metadata = read_safetensors(path)
    if "state" not in metadata:
        raise InputError(f"{path}: a safetensors file, but not a checkpoint of its2clr (no state in its metadata)")
    with damage_said(f"{path}: not a readable checkpoint"):
        return tensors, dict(json.loads(metadata["state"]))


def read_safetensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file.

    Raises:
        InputError: The file is damaged, or is not a safetensors file.
    """
    with damage_said(f"{path}: not a readable safetensors file"), safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add `prefix.` to every name."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors whose name starts with `prefix.`, which is removed."""
    return {k.removeprefix(f"{prefix}."): v for k, v in tensors.items() if k.startswith(f"{prefix}.")}


def load_module(module: nn.Module, tensors: Mapping[str, Tensor], path: str | Path) -> None:
    """Load a state dict strictly; the error for a mismatch names the keys.

    Raises:
        InputError: Keys or shapes differ.
    """
    try:
        module.load_state_dict(dict(tensors), strict=True)
    except RuntimeError as error:
        raise InputError(f"{path}: these weights do not fit the configured model: {error}") from error


def optimiser_tensors(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's per-parameter tensors (momentum), named by parameter position."""
    state = optimiser.state_dict()["state"]
    return {
        f"{position}.{name}": value
        for position, values in state.items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def load_optimiser(optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Restore what `optimiser_tensors` returned, in the parameters' memory layout; the loop sets the learning rates."""
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        position, name = key.split(".", 1)
        parameter = parameters[int(position)]
        same = value.shape == parameter.shape  # then use its memory layout: a fused optimiser needs it
        state.setdefault(int(position), {})[name] = torch.empty_like(parameter).copy_(value) if same else value
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})

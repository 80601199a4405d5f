"""Which weights of the encoder a refinement trains: all, those after a block, or low-rank changes to some layers."""

import copy
import importlib.util
from collections.abc import Iterator

import torch
from torch import nn

from its2clr.config import LoraSettings, RefineConfig
from its2clr.encoders.encoder import EmbeddingNetwork, Encoder
from its2clr.errors import InputError
from its2clr.seeds import derive_seed


def limit_training(encoder: Encoder, config: RefineConfig, seed: int) -> None:
    """Freeze weights and add low-rank layers as the settings say, in place.

    Args:
        encoder: The encoder to be refined.
        config: `freeze_until` and `lora`.
        seed: Seed of the low-rank layers.

    Raises:
        InputError: The encoder has no such block or layer, nothing is left to train, or peft is missing.
    """
    check_limits(encoder, config)
    if config.freeze_until is not None:
        freeze_until(encoder, config.freeze_until)
    if config.lora is not None:
        _add_lora(encoder, config.lora, seed)


def check_limits(encoder: Encoder, config: RefineConfig) -> None:
    """Check that the encoder has the blocks and layers that the settings name, and that peft is there if needed.

    Raises:
        InputError: Something is missing.
    """
    if config.freeze_until is not None:
        _frozen_blocks(encoder, config.freeze_until)
    if config.lora is not None:
        _check_targets(encoder, config.lora.targets)
        if importlib.util.find_spec("peft") is None:
            raise InputError("refine.lora needs peft: pip install 'its2clr[lora]'")


def freeze_until(encoder: Encoder, block: str) -> None:
    """Freeze everything up to and including a block: no gradients, and batch norm stays in evaluation mode.

    Args:
        encoder: Changed in place.
        block: A child of the timm backbone (`layer2`), or a part of one that is a sequence (`blocks.5`).

    Raises:
        InputError: There is no such block, or nothing is left to train.
    """
    frozen = _frozen_blocks(encoder, block)
    own = list(encoder.backbone.parameters(recurse=False))  # class token and positions come before all blocks
    for parameter in [*own, *(parameter for module in frozen for parameter in module.parameters())]:
        parameter.requires_grad = False
    encoder.frozen = tuple(frozen)
    encoder.train(encoder.training)


def without_lora(network: EmbeddingNetwork) -> EmbeddingNetwork:
    """A copy whose low-rank changes are added to the plain weights; the network itself if it has none."""
    if not any(name.endswith("lora_A") for name, _ in network.named_modules()):
        return network
    plain = copy.deepcopy(network)
    for name, module in list(plain.named_modules()):
        if hasattr(module, "lora_A"):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(plain.get_submodule(parent), child, module.get_base_layer())
    return plain


def _blocks(encoder: Encoder) -> Iterator[tuple[str, nn.Module]]:
    """Blocks of the backbone in the order of its children; of a sequence, its parts."""
    for name, child in encoder.backbone.named_children():
        if isinstance(child, nn.Sequential | nn.ModuleList) and len(child):
            yield from ((f"{name}.{part}", module) for part, module in child.named_children())
        else:
            yield name, child


def _frozen_blocks(encoder: Encoder, block: str) -> list[nn.Module]:
    blocks = list(_blocks(encoder))
    last = max((n for n, (name, _) in enumerate(blocks) if f"{name}.".startswith(f"{block}.")), default=None)
    if last is None:
        raise InputError(
            f"refine.freeze_until: the encoder has no block {block!r}; it has {', '.join(name for name, _ in blocks)}"
        )
    if not any(parameter.numel() for _, module in blocks[last + 1 :] for parameter in module.parameters()):
        raise InputError(f"refine.freeze_until={block} leaves nothing of the encoder to train; name an earlier block")
    return [module for _, module in blocks[: last + 1]]


def _check_targets(encoder: Encoder, targets: list[str]) -> None:
    layers = [name for name, module in encoder.backbone.named_modules() if isinstance(module, nn.Linear)]
    missing = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in layers)]
    if missing:
        known = sorted({".".join(name.split(".")[-2:]) for name in layers})
        raise InputError(
            f"refine.lora.targets: no linear layer of the encoder is named {', '.join(missing)}; it has "
            f"{', '.join(known) or 'none: LoRA is for transformers, use refine.freeze_until instead'}"
        )


def _add_lora(encoder: Encoder, config: LoraSettings, seed: int) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "lora"))
        targets = "|".join(target.replace(".", r"\.") for target in config.targets)
        wanted = LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=rf"(.*\.)?({targets})")
        inject_adapter_in_model(wanted, encoder.backbone)

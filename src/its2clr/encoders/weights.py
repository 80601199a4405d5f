"""Saving and loading of encoder and projector as one safetensors file that knows how to rebuild them."""

import json
import shlex
from pathlib import Path
from typing import Any

from torch import Tensor

from its2clr.config import FEATURES, EncoderConfig, ProjectorConfig, RunConfig
from its2clr.encoders.adapter import adapter_encoder
from its2clr.encoders.encoder import (
    FOREIGN_WEIGHTS,
    EmbeddingNetwork,
    Encoder,
    SideBySide,
    create_encoder,
    create_projector,
)
from its2clr.engine.bounded import bounded_by
from its2clr.engine.checkpoint import load_checkpoint, load_module, save_checkpoint
from its2clr.engine.training_state import BestCheckpoints
from its2clr.engine.workspace import Workspace
from its2clr.errors import InputError
from its2clr.version import __version__


def without_foreign_weights(config: EncoderConfig) -> EncoderConfig:
    """The same encoder without the weights it once started from, so that nothing is fetched when it is built."""
    options = {key: value for key, value in config.options.items() if key not in FOREIGN_WEIGHTS}
    return config.model_copy(update={"pretrained": False, "weights": None, "options": options})


def create_network(config: RunConfig) -> EmbeddingNetwork:
    """A fresh encoder and projector."""
    encoder = create_encoder(adapter_encoder(config))
    return EmbeddingNetwork(encoder, create_projector(encoder.projected_dim, config.projector))


def built_as(encoder: Encoder, config: RunConfig) -> EncoderConfig:
    """How an encoder of a run is built: as the settings say, with the start beside it or not."""
    paired = isinstance(getattr(encoder, "backbone", None), SideBySide)
    return adapter_encoder(config).model_copy(update={"side_by_side": paired})


def save_network(path: str | Path, network: EmbeddingNetwork, config: RunConfig, notes: dict[str, Any]) -> None:
    """Write encoder and projector with all that is needed to rebuild them."""
    state = {
        "its2clr": __version__,
        "encoder": built_as(network.encoder, config).model_dump(mode="json"),
        "projector": config.projector.model_dump(mode="json"),
        "notes": notes,
    }
    save_checkpoint(path, network.state_dict(), state)


class BestEncoder(BestCheckpoints):
    """The encoders of a stage, with their projectors, that were the best when they were measured.

    Args:
        run: Where they live.
        stage: Whose they are.
        config: How the network is built.
    """

    def __init__(self, run: Workspace, stage: str, config: RunConfig) -> None:
        super().__init__(run, stage)
        self._config = config

    def keep(self, epoch: int, network: EmbeddingNetwork) -> None:
        """Write the network of an epoch; the first process does."""
        if self._run.engine.is_writer:
            save_network(self.path(epoch), network, self._config, {"stage": self._stage, "best_epoch": epoch})


def check_same_network(path: str | Path, config: RunConfig) -> None:
    """Check that a checkpoint's encoder and projector are built as the settings say, constants included.

    Raises:
        InputError: They are not; the message names the settings that would be right.
    """
    _, encoder, projector = _read(path)
    made = _built(encoder, projector)
    wanted = _built(adapter_encoder(config), config.projector)
    differing = [key for key in made if key in wanted and made[key] != wanted[key]]
    if differing:
        settings = " ".join(f"--set {shlex.quote(f'{key}={json.dumps(made[key])}')}" for key in differing)
        message = (
            f"pretrain.start: {path} was made with other settings of {', '.join(differing)} than this run has; begin "
            f"this one with {settings}"
        )
        if _sides(made) != _sides(wanted):
            message += (
                f"; or, for tiles of another size, give it as encoder.weights={path} with your own img_size, to which "
                "its position embeddings are then resampled"
            )
        raise InputError(message)


def _built(encoder: EncoderConfig, projector: ProjectorConfig) -> dict[str, Any]:
    """What a network is built from, by setting; of an adapter over features only its width, for the rest may change."""
    values = {f"projector.{key}": value for key, value in projector.model_dump(mode="json").items()}
    if encoder.name == FEATURES:
        return values | {"adapter.hidden_dim": encoder.options.get("hidden_dim")}
    built = without_foreign_weights(encoder).model_dump(mode="json", exclude={"weights_matched", "side_by_side"})
    return values | {f"encoder.{key}": value for key, value in built.items()}


def _sides(built: dict[str, Any]) -> Any:
    options = built.get("encoder.options") or {}
    return options.get("img_size"), options.get("dynamic_img_size")


def load_network(path: str | Path) -> EmbeddingNetwork:
    """Rebuild what `save_network` wrote.

    Raises:
        InputError: The file is missing, damaged or holds no network.
    """
    tensors, encoder_config, projector_config = _read(path)
    with bounded_by(tensors, path):
        encoder = create_encoder(without_foreign_weights(encoder_config))
        network = EmbeddingNetwork(encoder, create_projector(encoder.projected_dim, projector_config))
    load_module(network, tensors, path)
    return network


def _read(path: str | Path) -> tuple[dict[str, Tensor], EncoderConfig, ProjectorConfig]:
    tensors, state = load_checkpoint(path)
    if "encoder" not in state or "projector" not in state:
        raise InputError(f"{path}: a checkpoint of its2clr, but not of an encoder")
    return tensors, EncoderConfig.model_validate(state["encoder"]), ProjectorConfig(**state["projector"])

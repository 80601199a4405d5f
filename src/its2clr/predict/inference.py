"""A trained model at work: opened on a device, and its scores for any number of bags, a part of them at a time."""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from its2clr.bag_features import BagFeatures
from its2clr.cohort import Cohort
from its2clr.encoders.extraction import extract_features
from its2clr.engine.devices import Engine
from its2clr.engine.progress import ProgressBar
from its2clr.errors import InputError
from its2clr.plugins import allow_named, import_plugins
from its2clr.predict.model_file import TrainedModel
from its2clr.predict.model_of_run import open_model
from its2clr.run.scores import Scores
from its2clr.settings import parse_override, resolve_config
from its2clr.tile_store import TileStore

GROUP_BYTES = 2**28
"""Bytes of decoded tiles held at once, while as many are being decoded; a larger bag is a part of its own."""


def open_for_prediction(
    model: str | Path | TrainedModel, overrides: Sequence[str] | Mapping[str, Any] = (), *, quiet: bool = False
) -> tuple[TrainedModel, Engine]:
    """A model, and the engine it runs on; its precision is that of the run, unless the overrides say otherwise.

    Raises:
        InputError: There is no model, or the overrides would change a setting of the model.
    """
    given = dict(overrides) if isinstance(overrides, Mapping) else dict(parse_override(text) for text in overrides)
    for key in given:
        if key != "plugins" and key.partition(".")[0] != "engine":
            raise InputError(
                f"--set {key}: a trained model keeps its settings; only `engine.` settings and `plugins` can be given"
            )
    allow_named(given)
    import_plugins(resolve_config(None, given).plugins)
    opened = model if isinstance(model, TrainedModel) else open_model(model)
    precision = {"engine.precision": opened.description.precision}
    engine = Engine(resolve_config(None, {**precision, **given}).engine)
    engine.bars.enabled &= not quiet
    return opened, engine


def score_bags(model: TrainedModel, cohort: Cohort, engine: Engine) -> Scores:
    """Scores of every retrained aggregator, of all folds, for the bags of a cohort, whose labels are not looked at.

    A bag's scores do not depend on the other bags.

    Args:
        model: The model.
        cohort: Bags whose tiles fit the model.
        engine: Where to compute.
    """
    found = [
        [Scores.of(member.aggregators, features) for member, features in zip(model.members, of_members, strict=True)]
        for of_members in represent_bags(model, cohort, engine)
    ]
    return Scores(
        np.concatenate([np.concatenate([one.bags for one in part]) for part in found], axis=1),
        np.concatenate([np.concatenate([one.instances for one in part]) for part in found], axis=1),
    )


def represent_bags(model: TrainedModel, cohort: Cohort, engine: Engine) -> Iterator[list[BagFeatures]]:
    """Features of the bags of a cohort by each member of a model, part after part, in the order of the bags.

    Raises:
        InputError: The tiles have another size than the model's.
    """
    misfit = model.tiling.misfit_of_cohort(cohort.info)
    if misfit is not None:
        raise InputError(f"{cohort.path}: {misfit}")
    bars = ProgressBar(enabled=engine.bars.enabled, console=engine.bars.console)
    total = cohort.n_instances * len(model.members)
    with bars.start("predict", total, "tiles") as progress, _silent(engine):
        encoders = [member.encoder.to(engine.device) for member in model.members]
        for part, tiles in _decoded(cohort.without_labels(), engine):
            offsets = torch.from_numpy(part.offsets())
            yield [
                BagFeatures(extract_features(encoder, tiles, engine, engine.extract_batch_size, progress), offsets)
                for encoder in encoders
            ]


def bag_groups(cohort: Cohort, group_bytes: int) -> list[Cohort]:
    """A cohort in parts of neighbouring bags, each small enough to be held decoded."""
    of_instance = math.prod(cohort.instance_shape) * np.dtype(cohort.instance_dtype).itemsize
    return list(cohort.groups(group_bytes // of_instance))


def _decoded(cohort: Cohort, engine: Engine) -> Iterator[tuple[Cohort, TileStore]]:
    """Each part with its tiles; the next part is decoded while this one is used."""
    parts = bag_groups(cohort, GROUP_BYTES)
    if engine.world_size > 1:  # all processes decode together, so none may run ahead
        yield from ((part, TileStore.from_cohort(part, engine)) for part in parts)
        return
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(TileStore.from_cohort, parts[0], engine)
        for number, part in enumerate(parts):
            tiles = ahead.result()
            if number + 1 < len(parts):
                ahead = pool.submit(TileStore.from_cohort, parts[number + 1], engine)
            yield part, tiles


@contextmanager
def _silent(engine: Engine) -> Iterator[None]:
    """One bar is enough: those of decoding and extraction are not shown."""
    shown, engine.bars.enabled = engine.bars.enabled, False
    try:
        yield
    finally:
        engine.bars.enabled = shown

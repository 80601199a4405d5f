"""The stages with the networks and settings that people run: those of recipes, each beside two limits.

One limit is the recipe's own network, bare. The other is the fastest network of its shape, which has batch norm.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from its2clr.bench.measure import Bench
from its2clr.config import RunConfig
from its2clr.errors import InputError
from its2clr.pretrain.loop import epoch_indices, prepare
from its2clr.refine.finetuning import limit_training
from its2clr.refine.objectives import OBJECTIVES
from its2clr.settings import read_recipe, recipe_names, resolve_config
from its2clr.training import Batches, TrainingStep

PAPER_RECIPE, PAPER_TILES = "camelyon16", 250_000
PAPER_HOURS = {"pretraining": 90.0, "refinement": 10.0, "one update": 10 / 60}
"""What Camelyon16 took in the paper (section 4.5)."""
LIMITS = {"pretraining epoch": "bare training", "refinement epoch": "bare training", "extraction": "bare inference"}
"""Stages, and the yardstick of each."""
FASTEST = ", fastest of this shape"
RATES, MEMORY = "images_per_second", "peak_gigabytes"
_OF_A_STEP = {
    "pretrain": {"method", "optimiser", "batch_size", "views", "queue_size", "dino", "gradient_clip", "decay_biases"},
    "refine": {"objective", "batch_size", "views", "freeze_until", "lora"},
}
"""Settings that decide how fast a step is. Recipes that have the same are measured once."""


def recipe_configs(names: Sequence[str], overrides: Sequence[str]) -> dict[str, RunConfig]:
    """Settings of recipes, by name.

    Args:
        names: Names, or YAML files; none: those of the package that train an encoder of images.
        overrides: Settings changed in all of them.

    Raises:
        InputError: There is no such recipe, it is one for features, or a setting is wrong.
    """
    for_images = [name for name in names or recipe_names() if "adapter" not in read_recipe(name)]
    if refused := [name for name in names if name not in for_images]:
        raise InputError(f"recipe {refused[0]}: it is for features, so there is no network of images to measure")
    return {name: resolve_config(name, overrides) for name in for_images}


def measure_recipes(bench: Bench, recipes: Mapping[str, RunConfig]) -> dict[str, Any]:
    """Images per second, and on a GPU the most memory, of every recipe's stages and limits; by recipe.

    Args:
        bench: Size and device.
        recipes: Their settings.
    """
    size = replace(bench.size, side=bench.size.recipe_side, tiles=bench.size.recipe_tiles)
    of_all, once = Bench(size, bench.engine, bench.config), _Once(bench.engine.device.type == "cuda")
    return {name: _measure(of_all, config, once) for name, config in recipes.items()}


class _Once:
    """Measures each thing once, by the settings that it depends on.

    Args:
        on_gpu: Whether to note the most memory too.
    """

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._known: dict[str, tuple[float, float]] = {}

    def __call__(self, work: Callable[[Bench], float], bench: Bench, *settings: Any) -> tuple[float, float]:
        config = bench.config
        network = (config.encoder.model_dump(mode="json"), config.projector.model_dump(mode="json"))
        key = json.dumps([work.__name__, network, bench.size.batch, settings])
        if key not in self._known:
            if self._on_gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            rate = work(bench)
            self._known[key] = rate, torch.cuda.max_memory_allocated() / 1e9 if self._on_gpu else 0.0
        return self._known[key]


def _measure(of_all: Bench, config: RunConfig, once: _Once) -> dict[str, dict[str, float]]:
    def of(config: RunConfig, batch: int) -> Bench:
        size = replace(of_all.size, batch=min(batch, len(of_all.tiles) // 2))
        return Bench(size, of_all.engine, config, of_all.tiles)

    batch_norm = config.model_copy(update={"encoder": config.encoder.model_copy(update={"norm": "batch"})})
    ours, fastest = (of(each, config.pretrain.batch_size) for each in (config, batch_norm))
    in_refinement = of(config, config.refine.batch_size)
    steps = {
        stage: getattr(config, stage).model_dump(mode="json", include=names) for stage, names in _OF_A_STEP.items()
    }
    measured = {
        "bare training": once(_bare_training, ours),
        f"bare training{FASTEST}": once(_bare_training, fastest),
        "pretraining epoch": once(_pretraining, ours, steps["pretrain"]),
        "refinement epoch": once(_refinement, in_refinement, steps["refine"]),
        "bare inference": once(Bench.bare_inference, ours),
        f"bare inference{FASTEST}": once(Bench.bare_inference, fastest),
        "extraction": once(Bench.extraction_from_store, ours),
    }
    found = {RATES: {name: rate for name, (rate, _) in measured.items()}}
    peaks = {name: peak for name, (_, peak) in measured.items() if peak}
    return found | ({MEMORY: peaks} if peaks else {})


def _bare_training(bench: Bench) -> float:
    return bench.bare_training(compiled=bench.engine.device.type == "cuda")


def _pretraining(bench: Bench) -> float:
    config, batch, tiles = bench.config.pretrain, bench.size.batch, len(bench.tiles)
    method = prepare(bench.network(), config, 0)
    step = TrainingStep(
        method.network, bench.tiles, method.loss, config, batch, 1, bench.engine,
        crops=method.crops, records=method.records, edit_gradients=method.edit_gradients,
    )  # fmt: skip

    def batches(epoch: int) -> Batches:
        indices = epoch_indices(tiles, batch, 0, epoch)
        return Batches(indices, indices % 2 if method.labelled else None)

    def after_step(number: int) -> None:
        if method.update is not None:
            method.update(number, tiles // batch)

    return bench.epochs(step, batches, after_step)


def _refinement(bench: Bench) -> float:
    config, network = bench.config.refine, bench.network()
    limit_training(network.encoder, config, 0)
    prepared = OBJECTIVES.find(config.objective)(network, config, 0)
    step = TrainingStep(prepared.network, bench.tiles, prepared.loss, config, bench.size.batch, 1, bench.engine)
    return bench.epochs(step, bench.refine_batches)


def recipe_ratios(recipes: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Stages of every recipe as a share of its own bare network, and of the fastest of its shape."""
    found: dict[str, dict[str, float]] = {}
    for recipe, measured in recipes.items():
        rates = measured[RATES]
        found[recipe] = {
            f"{stage} / {limit}{suffix}": rates[stage] / rates[limit + suffix]
            for stage, limit in LIMITS.items()
            for suffix in ("", FASTEST)
        }
    return found


def paper_hours(recipes: dict[str, Any], aggregator_seconds: float | None) -> dict[str, dict[str, float]]:
    """Hours that the paper's run on Camelyon16 would take with its recipe at the measured rates, beside the paper's.

    Args:
        recipes: What was measured.
        aggregator_seconds: Seconds of the aggregator of one update; None if they were not measured.
    """
    config, rates = resolve_config(PAPER_RECIPE), recipes[PAPER_RECIPE][RATES]
    seconds = {
        "pretraining": config.pretrain.epochs * 2 * PAPER_TILES / rates["pretraining epoch"],
        "refinement": config.refine.epochs * 2 * PAPER_TILES / rates["refinement epoch"],
    }
    if aggregator_seconds is not None:
        seconds["one update"] = PAPER_TILES / rates["extraction"] + aggregator_seconds
    return {name: {"projected": value / 3600, "paper": PAPER_HOURS[name]} for name, value in seconds.items()}

"""What a fit is going to do and how long it takes: counted before, measured on its first steps."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from its2clr.bags import Context
from its2clr.config import RunConfig
from its2clr.engine.devices import Engine
from its2clr.engine.progress import TotalWork
from its2clr.errors import InputError

_STAGES = ("pretrain", "refine")
LONG_SECONDS = 12 * 3600
"""Encoder training on a CPU that takes longer is worth a question."""


class StageWork(NamedTuple):
    """The encoder training of one stage.

    Attributes:
        stage: `pretrain` or `refine`.
        epochs: Its epochs.
        left: Those that are not trained yet.
        steps: Steps of an epoch.
        batch_size: Tiles of a step.
    """

    stage: str
    epochs: int
    left: int
    steps: int
    batch_size: int

    @property
    def tiles(self) -> int:
        """Tiles that are still to be trained with, each counted as often as it is seen."""
        return self.left * self.steps * self.batch_size


def plan_work(
    config: RunConfig, instances: int, engine: Engine, *, pretrains: bool, metrics: Sequence[dict[str, Any]] = ()
) -> list[StageWork]:
    """The encoder training that is left of a fit.

    Args:
        config: The settings.
        instances: Training instances.
        engine: Divides batches among processes.
        pretrains: Whether there is a start to be trained; features and a given start need none.
        metrics: What the run has logged so far.
    """
    done = {stage: max((one["epoch"] for one in metrics if one["stage"] == stage), default=0) for stage in _STAGES}
    pretrain, refine, work = config.pretrain, config.refine, []
    if pretrains and pretrain.epochs > 0:
        size = engine.divisible_batch_size("pretrain", min(pretrain.batch_size, instances))
        steps = max(instances // size, math.ceil(pretrain.least_steps / pretrain.epochs))
        work.append(StageWork("pretrain", pretrain.epochs, pretrain.epochs - done["pretrain"], steps, size))
    size = engine.divisible_batch_size("refine", refine.batch_size)
    steps = refine.steps_per_epoch or max(refine.least_steps, math.ceil(instances / size))
    work.append(StageWork("refine", refine.epochs, refine.epochs - done["refine"], steps, size))
    return [one for one in work if one.left > 0]


def announce(
    context: Context,
    metrics: Sequence[dict[str, Any]],
    ask: Callable[[str], bool] | None,
    *,
    pretrains: bool,
) -> TotalWork:
    """Say what a fit is going to do and on what; how long it takes is said after the first steps.

    Args:
        context: Settings, bags and device.
        metrics: What the run has logged so far.
        ask: Asks the person at the terminal whether very long work on a CPU should go on; None if nobody is there.
        pretrains: Whether there is a start to be trained.

    Returns:
        What counts the work.
    """
    train, validation, engine = context.train, context.validation, context.engine
    work = plan_work(context.config, len(train.bag_of_instance), engine, pretrains=pretrains, metrics=metrics)
    bags = f"{len(train.labels)} training bags ({int((train.labels == 1).sum())} positive)"
    engine.say(
        f"fit: {bags} with {len(train.bag_of_instance):,} instances, {len(validation.labels)} validation bags, on "
        f"{engine.device_name}"
    )
    if work:
        stages = "; ".join(f"{one.stage} {one.left} epochs of {one.steps} steps of {one.batch_size}" for one in work)
        engine.say(f"fit: encoder training that is left: {stages}; how long it takes is said after the first steps")

    def estimated(seconds: float, rate: float) -> None:
        engine.say(f"fit: about {said_duration(seconds)} of encoder training left, at {rate:.3g} tiles/s")
        if engine.device.type != "cpu" or seconds < LONG_SECONDS:
            return
        engine.say(
            f"warning: {said_duration(seconds)} on a CPU; a GPU is much faster, and shorter settings (see `its2clr "
            "recipes`; --set pretrain.epochs=..., --set refine.epochs=...) need a new folder"
        )
        if ask is not None and engine.world_size == 1 and not ask("Go on?"):
            raise InputError("stopped, as asked; the same command goes on from the last saved epoch")

    return TotalWork(sum(one.tiles for one in work), estimated)


def said_duration(seconds: float) -> str:
    """A duration as people say it."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}" if seconds < 10 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"

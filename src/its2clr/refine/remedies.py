"""What a stuck refinement tries, one remedy after the other, and how that is noted and said."""

from typing import Any, NamedTuple, TypedDict

from its2clr.config import RefineConfig

RETRIES_FILE = "retries.json"
"""In the folder of a run whose refinement was stuck: a list of `Retry`."""
SAFE_TEMPERATURE = 0.2
"""Trained where 0.07 got stuck."""
USUAL_MOMENTUM = 0.9


class Remedy(NamedTuple):
    """Settings to try, and how to say them."""

    changes: dict[str, Any]
    words: str


class Retry(TypedDict):
    """A time that refinement was stuck, and what it did.

    Attributes:
        seen: Epoch after which it was seen.
        loss: Loss of that epoch.
        collapsed_loss: Loss of a single point.
        spread: Spread of that epoch.
        back_to: Epoch whose state it went back to; 0: the start.
        remedy: What it tried from there.
    """

    seen: int
    loss: float
    collapsed_loss: float
    spread: float
    back_to: int
    remedy: str


def remedies(config: RefineConfig) -> list[Remedy]:
    """As many as `retries` allows: smaller steps; a higher temperature too; then smaller steps still, other momentum.

    After going back, the learning rate always rises from zero over one epoch.
    """
    slower, slowest = 0.3 * config.learning_rate, 0.1 * config.learning_rate
    warmer = max(config.temperature, SAFE_TEMPERATURE)
    momentum = USUAL_MOMENTUM if config.momentum == 0 else config.momentum / 2
    steps: list[dict[str, float]] = [{"learning_rate": slower}]
    if warmer > config.temperature:
        steps.append({"learning_rate": slower, "temperature": warmer})
    steps.append({"learning_rate": slowest, "temperature": warmer, "momentum": momentum})
    return [Remedy(changes, _words(config, changes)) for changes in steps][: config.retries]


def remedied(config: RefineConfig, retries: int) -> RefineConfig:
    """The settings in use after this many retries."""
    return config.model_copy(update=remedies(config)[retries - 1].changes) if retries else config


def said_retry(retry: Retry) -> str:
    """What was seen, and what is tried; a sentence without its end."""
    place = "the start" if retry["back_to"] == 0 else f"the state after epoch {retry['back_to']}"
    return (
        f"refinement was stuck by epoch {retry['seen']} (loss {retry['loss']:.4f}, of a single point "
        f"{retry['collapsed_loss']:.4f}; spread {retry['spread']:.4f}): it went back to {place} and tried "
        f"{retry['remedy']}"
    )


def _words(config: RefineConfig, changes: dict[str, float]) -> str:
    changed = [
        f"refine.{name}={value:g} instead of {getattr(config, name):g}"
        for name, value in changes.items()
        if value != getattr(config, name)
    ]
    return f"{', '.join(changed)}, with one epoch of warm-up"

"""What a search may change: a range or a list of values for each setting, and the settings that a draw stands for."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from its2clr.aggregators import create_aggregator
from its2clr.config import RunConfig
from its2clr.errors import InputError
from its2clr.files import damage_said
from its2clr.settings import flatten, parse_yaml, resolve_config

if TYPE_CHECKING:
    from optuna.trial import Trial

STRENGTH = "refine.views.strength"
"""A key of spaces only: a factor of the recipe's brightness, contrast, saturation and hue, all at once."""
JITTER = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.5}
"""What the strength multiplies, with the largest value that each may have."""
TUNABLE = ("encoder", "adapter", "projector", "pretrain", "aggregator", "refine")
FIXED = ("pretrain.start", "refine.labels", "refine.corrections", "refine.hand_over")
"""Settings within the tunable sections that say what is learned from or handed over, not how it is learned."""
RATIOS = (0.001, 0.01, 0.03, 0.1, 0.2)
"""Shares of the top-k pooling that the paper searches."""
EXPECTED = "{low: 0.001, high: 0.3, log: true} or a list of two or more values"


class Range(BaseModel):
    """Numbers from `low` to `high`, both included."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    low: int | float
    high: int | float
    log: bool = False
    step: int | float | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "Range":
        if self.low >= self.high:
            raise ValueError(f"low ({self.low}) must be smaller than high ({self.high})")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError("log needs a low above 0, and no step")
        if self.step is not None and self.step <= 0:
            raise ValueError("step must be larger than 0")
        return self

    def holds(self, value: Any) -> bool:
        """Whether a value is a number within the range (and on its grid)."""
        if not isinstance(value, int | float) or not self.low <= value <= self.high:
            return False
        return self.step is None or abs((value - self.low) / self.step % 1) < 1e-9

    def written(self) -> dict[str, Any]:
        """As in a file."""
        return self.model_dump(exclude_defaults=True)


class Space:
    """The settings that a search may change.

    Args:
        entries: A range or a list of values for each dotted key, as in a file.
        base: The recipe's settings, which everything that is not drawn keeps.
        where: Where the space comes from, for errors.

    Raises:
        InputError: A key is unknown or not to be searched, or a value is not allowed.
    """

    def __init__(self, entries: Mapping[str, Any], base: RunConfig, where: str = "space") -> None:
        self._base, self._where = base, where
        self._recipe = flatten(base.model_dump(mode="json"))
        if not entries:
            raise InputError(f"{where}: nothing to search; give for example `refine.learning_rate: {EXPECTED}`")
        self._entries = {key: self._entry(str(key), entry) for key, entry in entries.items()}
        for key, entry in self._entries.items():
            for value in (entry.low, entry.high) if isinstance(entry, Range) else entry:
                self._check(key, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def written(self) -> dict[str, Any]:
        """As in a file."""
        return {key: entry.written() if isinstance(entry, Range) else entry for key, entry in self._entries.items()}

    def recipe(self) -> dict[str, Any]:
        """The recipe's own value of every key."""
        return {key: self._own(key) for key in self._entries}

    def recipe_parameters(self) -> dict[str, Any]:
        """The recipe's own values as Optuna's parameters, of those keys whose range or list holds them."""
        found = {}
        for key, entry in self._entries.items():
            value = self._own(key)
            if entry.holds(value) if isinstance(entry, Range) else value in entry:
                found[key] = value if isinstance(entry, Range) else _named(value)
        return found

    def draw(self, trial: "Trial", keys: Sequence[str] | None = None) -> dict[str, Any]:
        """Values of some or all keys, as Optuna suggests them; real numbers have four digits."""
        drawn = {}
        for key in self._entries if keys is None else keys:
            entry = self._entries[key]
            if not isinstance(entry, Range):
                names = {_named(value): value for value in entry}
                drawn[key] = names[trial.suggest_categorical(key, list(names))]
            elif self._is_whole(key, entry):
                low, high = int(entry.low), int(entry.high)
                drawn[key] = trial.suggest_int(key, low, high, step=int(entry.step or 1), log=entry.log)
            else:
                value = trial.suggest_float(key, entry.low, entry.high, step=entry.step, log=entry.log)
                drawn[key] = min(max(float(f"{value:.4g}"), float(entry.low)), float(entry.high))
        return self._ordered(drawn)

    def config(self, drawn: Mapping[str, Any]) -> RunConfig:
        """The recipe's settings with the drawn ones.

        Raises:
            InputError: They do not go together.
        """
        changes = dict(drawn)
        if (strength := changes.pop(STRENGTH, None)) is not None:
            views = self._base.refine.views
            for name, most in JITTER.items():
                changes[f"refine.views.{name}"] = min(most, round(strength * getattr(views, name), 4))
        return resolve_config(None, changes, self._base.model_dump(mode="json"), self._where)

    def _ordered(self, drawn: dict[str, Any]) -> dict[str, Any]:
        """Raise r_T to r_0, and cut the warm-up to the number of epochs, where they were drawn the wrong way round."""
        own = self._base.refine
        initial = drawn.get("refine.initial_ratio", own.initial_ratio)
        if drawn.get("refine.final_ratio", own.final_ratio) < initial:
            drawn["refine.final_ratio"] = initial
        if "refine.warmup_epochs" in drawn:
            drawn["refine.warmup_epochs"] = min(drawn["refine.warmup_epochs"], drawn.get("refine.epochs", own.epochs))
        return drawn

    def _own(self, key: str) -> Any:
        section, _, option = key.partition(".options.")
        aggregator = {"aggregator": self._base.aggregator, "refine.reader": self._base.refine.reader}.get(section)
        if key == STRENGTH:
            return 1.0
        if aggregator is not None and option:  # an option that the recipe leaves out has the aggregator's own default
            return getattr(create_aggregator(aggregator.name, 64, **aggregator.options), option, None)
        return self._recipe.get(key)

    def _is_whole(self, key: str, entry: Range) -> bool:
        numbers = (entry.low, entry.high, entry.step or 1)
        return all(isinstance(number, int) for number in numbers) and not isinstance(self._own(key), float)

    def _entry(self, key: str, entry: Any) -> Range | list[Any]:
        if isinstance(entry, list) and len({_named(value) for value in entry}) == len(entry) > 1:
            return entry
        if not isinstance(entry, Mapping):
            raise InputError(f"{self._where}: {key}: expected {EXPECTED}, got {entry!r}")
        try:
            return Range.model_validate(entry)
        except ValidationError as error:
            found = error.errors()[0]
            place = "".join(f".{part}" for part in found["loc"] if part not in {"int", "float"})
            said = found["msg"].removeprefix("Value error, ")
            raise InputError(f"{self._where}: {key}{place}: {said}; expected {EXPECTED}") from error

    def _check(self, key: str, value: Any) -> None:
        if key == STRENGTH and not (isinstance(value, int | float) and value >= 0):
            raise InputError(f"{self._where}: {key}: expected factors of 0 or more, got {value!r}")
        config = self.config({key: value})
        if key.partition(".")[0] not in TUNABLE or key in FIXED:
            raise InputError(f"{self._where}: {key}: not a setting to search; it may be set with --set")
        reader = config.refine.reader
        if key.startswith("aggregator.") and reader is not None and config.pretrain.check_every == 0:
            raise InputError(
                f"{self._where}: {key}: would change nothing, because refine.reader ({reader.name}) makes the rounds "
                f"that trials are judged by; search refine.reader.{key.removeprefix('aggregator.')}"
            )
        for aggregator in (config.aggregator, reader):
            if aggregator is not None:
                create_aggregator(aggregator.name, 64, **aggregator.options)


def read_space(path: str | Path) -> dict[str, Any]:
    """Read a space from a YAML file.

    Raises:
        InputError: The file is not there or holds something else.
    """
    with damage_said(f"space {path}: cannot be read"):
        found = parse_yaml(Path(path).read_text(encoding="utf-8"), f"space {path}")
    if not isinstance(found, dict):
        raise InputError(f"space {path}: expected settings with what to search, e.g. refine.learning_rate: {EXPECTED}")
    return found


def default_space(config: RunConfig, kind: Literal["tiles", "features"] = "tiles") -> dict[str, Any]:
    """What is searched if no space is given: what the paper searches by hand, and views, temperature and length.

    Args:
        config: The recipe's settings; every range holds the recipe's own value.
        kind: What the cohort holds.
    """
    refine = config.refine
    space: dict[str, Any] = {"refine.learning_rate": _around(0.001, 0.3, refine.learning_rate, log=True)}
    if refine.threshold_rule == "fixed":
        space["refine.threshold"] = _around(0.1, 0.9, refine.threshold)
    else:
        space["refine.false_positive_rate"] = _around(0.005, 0.1, refine.false_positive_rate, log=True)
    space["refine.positive_fraction"] = _around(0.05, 0.5, refine.positive_fraction)
    space["refine.initial_ratio"] = _around(0.1, 0.8, refine.initial_ratio)
    space["refine.final_ratio"] = _around(0.2, 1.0, refine.final_ratio)
    space["refine.epochs"] = _lengths(config)
    space["refine.temperature"] = _around(0.05, 0.5, refine.temperature, log=True)
    if kind == "features":
        space["adapter.feature_noise"] = _around(0.0, 0.5, config.adapter.feature_noise)
    else:
        if any(getattr(refine.views, name) > 0 for name in JITTER):
            space[STRENGTH] = {"low": 0.0, "high": 1.25}
        own = refine.views.model_dump(mode="json")["crop_scale"]
        crops = [None, [0.5, 1.0], [0.25, 1.0]]
        space["refine.views.crop_scale"] = crops if own in crops else [*crops, own]
    section, aggregator = "aggregator", config.aggregator
    if refine.reader is not None:
        section, aggregator = "refine.reader", refine.reader
    if aggregator.name == "top_k":
        space[f"{section}.options.ratio"] = sorted({*RATIOS, float(aggregator.options.get("ratio") or RATIOS[-2])})
    if aggregator.name == "dsmil":
        own_weight = float(aggregator.options.get("loss_weight") or 1.0)
        space[f"{section}.options.loss_weight"] = _around(0.1, 5.0, own_weight, log=True)
    return space


def _around(low: float, high: float, own: float, *, log: bool = False) -> dict[str, Any]:
    """A range that is widened to hold the recipe's own value."""
    return {"low": min(low, own), "high": max(high, own), **({"log": True} if log else {})}


def _lengths(config: RunConfig) -> dict[str, Any]:
    """Half to twice the recipe's number of epochs in steps of a round, and at least one round after the warm-up."""
    refine = config.refine
    step = min(refine.refresh_every, refine.epochs)
    least = max(refine.epochs / 2, min(refine.warmup_epochs + step, refine.epochs))
    return {
        "low": refine.epochs - int((refine.epochs - least) // step) * step,
        "high": refine.epochs + refine.epochs // step * step,
        "step": step,
    }


def _named(value: Any) -> Any:
    """A value of a list as Optuna keeps it: a list or mapping as JSON."""
    return json.dumps(value) if isinstance(value, list | dict) else value

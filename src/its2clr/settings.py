"""Makes settings from a recipe and `key=value` overrides; the error for an unknown key gives the closest known one."""

import copy
import difflib
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from its2clr.config import RunConfig, Section
from its2clr.errors import InputError
from its2clr.files import damage_said
from its2clr.wording import did_you_mean

_MOST_VALUES = 10_000
_ALIKE = 0.8
"""From which likeness on a word is taken for a misspelt key, also of another section."""


def recipe_names() -> list[str]:
    """Names of the recipes in the package."""
    return sorted(p.name[:-5] for p in resources.files("its2clr.recipes").iterdir() if p.name.endswith(".yaml"))


def recipe_title(name: str) -> str:
    """What a recipe is for: the first sentence of its file."""
    lines = resources.files("its2clr.recipes").joinpath(f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.lstrip("# ") for line in itertools.takewhile(lambda line: line.startswith("#"), lines))
    return re.split(r"(?<=[A-Za-z)\d])[.:](?:\s|$)", comment, maxsplit=1)[0]


def read_recipe(recipe: str | Path) -> dict[str, Any]:
    """Read a built-in recipe by name, or the user's YAML file by path."""
    if str(recipe) in recipe_names():
        text = resources.files("its2clr.recipes").joinpath(f"{recipe}.yaml").read_text(encoding="utf-8")
    elif Path(recipe).is_file():
        with damage_said(f"recipe {recipe}: not a text file"):
            text = Path(recipe).read_text(encoding="utf-8")
    else:
        hint = did_you_mean(str(recipe), recipe_names(), else_list=True)
        raise InputError(f"no recipe named {str(recipe)!r}{hint}; give the name of a recipe or a .yaml file")
    values = parse_yaml(text, f"recipe {recipe}") or {}
    if not isinstance(values, dict):
        raise InputError(f"recipe {recipe}: expected keys and values, got {type(values).__name__}")
    engine = values.get("engine")
    if isinstance(engine, Mapping) and engine.get("tile_folder") is not None:
        raise InputError(
            f"recipe {recipe}: engine.tile_folder is where its2clr writes on this machine, which a file does not say; "
            "remove it from there, and give it after --set"
        )
    return values


def parse_yaml(text: str, where: str) -> Any:
    """Read settings written as YAML.

    Args:
        text: The YAML.
        where: What it is, for the error.

    Raises:
        InputError: It is no YAML, or aliases make it far larger than it looks.
    """
    with damage_said(f"{where}: not valid YAML"):
        value = _parsed(text)
        if _values_in(value, {}) > _MOST_VALUES:
            raise InputError(f"{where}: its aliases (*) repeat themselves to more than {_MOST_VALUES} values")
        return copy.deepcopy(value)  # the parsed one is kept


@cache
def _parsed(text: str) -> Any:
    return yaml.safe_load(text)


def _values_in(value: Any, known: dict[int, float]) -> float:
    """Values in lists and mappings when every alias is written out; infinite if one holds itself."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = math.inf
        held = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_values_in(one, known) for one in held)
    return known[id(value)]


def without_folders(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without `engine.tile_folder`: only the user says where to write, never a recipe, run or study."""
    engine = values.get("engine")
    if not isinstance(engine, Mapping):
        return dict(values)
    return {**values, "engine": {key: value for key, value in engine.items() if key != "tile_folder"}}


def resolve_config(
    recipe: str | Path | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    base: dict[str, Any] | None = None,
    where: str | None = None,
) -> RunConfig:
    """Make a checked config from a recipe and overrides.

    Args:
        recipe: Name of a built-in recipe or path of a YAML file; None: the defaults (the paper's).
        overrides: `["refine.epochs=20", ...]` as typed after `--set`, or a mapping of dotted keys to values.
        base: Settings to start from instead of a recipe; changed by the overrides.
        where: Where the settings come from, for the error; None: the recipe.

    Raises:
        InputError: A key is unknown (the message gives the closest known one), or a value is not allowed.
    """
    values = read_recipe(recipe) if recipe is not None else base or {}
    for key, value in overrides.items() if isinstance(overrides, Mapping) else map(parse_override, overrides):
        _put(values, key.split("."), copy.deepcopy(value))
    return validate_config(values, where or str(recipe or ("of the run" if base else "defaults")))


def validate_config(values: Mapping[str, Any], where: str) -> RunConfig:
    """Check a mapping of settings; `where` says in the error where they come from."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        lines = [_explain(item["loc"], item["type"], item["msg"]) for item in error.errors()]
        raise InputError(f"settings ({where}):\n  " + "\n  ".join(lines)) from error


PRECISION = "engine.precision"
"""The only engine setting that cannot change within a run."""


def config_difference(old: RunConfig, new: RunConfig) -> list[str]:
    """Settings that differ, one `key: old -> new` each; engine settings except the precision do not count."""
    left, right = flatten(old.model_dump(mode="json")), flatten(new.model_dump(mode="json"))
    keys = sorted(key for key in left.keys() | right.keys() if not key.startswith("engine.") or key == PRECISION)
    return [f"{k}: {left.get(k)!r} -> {right.get(k)!r}" for k in keys if left.get(k) != right.get(k)]


def parse_override(text: str) -> tuple[str, Any]:
    """Split `key=value` as typed after `--set`; the value is read as YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"--set {text!r}: expected key=value, for example refine.epochs=20")
    return key.strip(), parse_yaml(value, f"--set {text!r}")


def _put(values: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        nested = values.setdefault(name, {})
        if not isinstance(nested, dict):
            raise InputError(f"--set {'.'.join(path)}: {name} is a single value, not a section")
        values = nested
    values[path[-1]] = value


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def settings_by_key(section: Section, prefix: str = "") -> dict[str, Any]:
    """Every setting of a section by its dotted key; unlike in `flatten`, options stay together."""
    found: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        inner = isinstance(value, Section)
        found |= settings_by_key(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return found


def _explain(location: tuple[int | str, ...], kind: str, message: str) -> str:
    # Where several kinds of value are allowed, pydantic adds the kind, such as literal['balanced'], to the location.
    key = ".".join(str(part) for part in location if isinstance(part, int) or part.isidentifier())
    if kind != "extra_forbidden":
        return f"{key}: {message.removeprefix('Value error, ')}"
    model: type[BaseModel] = RunConfig
    for part in location[:-1]:
        annotation = model.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        model = annotation
    wrong = str(location[-1])
    elsewhere = _keys_like(wrong)
    own = difflib.get_close_matches(wrong.lower(), model.model_fields, n=1, cutoff=_ALIKE)
    if elsewhere and not own:
        return f"{key}: unknown key, did you mean {' or '.join(map(repr, elsewhere))}?"
    return f"{key}: unknown key{did_you_mean(wrong, model.model_fields, else_list=True)}"


def _keys_like(wrong: str) -> list[str]:
    """Dotted keys of all sections whose last word is much like this one."""
    keys = list(settings_by_key(RunConfig()))
    last = {key: key.rpartition(".")[2] for key in keys}
    close = difflib.get_close_matches(wrong.lower(), set(last.values()), n=1, cutoff=_ALIKE)
    return [key for key in keys if last[key] in close]

"""The user's own aggregators, objectives and pretraining methods: files or modules that register them when imported.

To import a plugin is to run it. So one is imported only if the user says so: by naming it after `--set` or in Python,
or, for those that a recipe, run or study names, with `its2clr --allow-plugins`.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from its2clr.errors import InputError
from its2clr.settings import parse_override, resolve_config

_ALL = "*"
_allowed: set[str] = set()


def allow_plugins(plugins: Iterable[str] | None = None) -> None:
    """Let this process import plugins.

    Args:
        plugins: Which, as settings name them; None: all that any file names.
    """
    _allowed.update([_ALL] if plugins is None else map(_as_in_settings, plugins))


def allow_named(overrides: Sequence[str] | Mapping[str, Any]) -> None:
    """Let this process import the plugins that the user names among overrides: after `--set`, or in Python."""
    given = overrides if isinstance(overrides, Mapping) else dict(map(parse_override, overrides))
    if "plugins" in given:
        allow_plugins(resolve_config(None, {"plugins": given["plugins"]}).plugins)


def allowed_plugins() -> list[str]:
    """What this process may import, for `allow_plugins` in the worker processes that it starts."""
    return sorted(_allowed)


def check_allowed(plugins: Sequence[str]) -> None:
    """Check that plugins may be imported; none is.

    Raises:
        InputError: One of them may not.
    """
    refused = [plugin for plugin in plugins if not {_ALL, plugin} & _allowed]
    if refused:
        raise InputError(
            f"plugins: the settings of this recipe, run or study name Python code: {', '.join(refused)}. It was not "
            "run: it could do whatever you can. Look at it; if you trust it, allow it with `its2clr --allow-plugins "
            "COMMAND ...`, or in Python with `its2clr.plugins.allow_plugins()`"
        )


def import_plugins(plugins: Sequence[str]) -> None:
    """Import each plugin once; settings can then use the names it registers.

    Args:
        plugins: Python files (`mine.py`) or importable modules (`lab.aggregators`).

    Raises:
        InputError: The user did not allow it, there is no such file or module, or it fails when imported.
    """
    check_allowed(plugins)
    for plugin in plugins:
        try:
            if plugin.endswith(".py"):
                _import_file(Path(plugin))
            else:
                importlib.import_module(plugin)
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"plugins: {plugin} cannot be imported: {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> None:
    if not path.is_file():
        raise InputError(f"plugins: there is no file {path}")
    name = f"its2clr_plugin_{path.stem}"
    known = sys.modules.get(name)
    if known is not None:
        if known.__file__ == str(path):
            return
        raise InputError(f"plugins: two files have the name {path.name}: {known.__file__} and {path}; rename one")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _as_in_settings(plugin: str) -> str:
    return str(Path(plugin).absolute()) if plugin.endswith(".py") else plugin

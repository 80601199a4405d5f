"""The user's own aggregators, objectives and pretraining methods: files or modules that register them when imported."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from its2clr.errors import InputError


def import_plugins(plugins: Sequence[str]) -> None:
    """Import each plugin once; settings can then use the names it registers.

    Args:
        plugins: Python files (`mine.py`) or importable modules (`lab.aggregators`).

    Raises:
        InputError: There is no such file or module, or it fails when imported.
    """
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

"""Names of things: registered once, found with a hint, built-in ones imported when asked for."""

import sys

import pytest

from its2clr.errors import InputError
from its2clr.registry import Registry
from its2clr.wording import did_you_mean, shortened, shortened_lines


def thing() -> None:
    """Something to register."""


def other() -> None:
    """Something else."""


def test_an_unknown_name_is_answered_with_the_closest_one() -> None:
    registry: Registry[object] = Registry("objective", {"cross_entropy": "nowhere"})
    registry.register("supervised")(thing)
    assert registry.names() == ["cross_entropy", "supervised"]
    with pytest.raises(InputError, match=r"unknown objective 'supervized', did you mean 'supervised'\? \(known: cross"):
        registry.find("supervized")


def test_a_name_is_given_once_but_the_same_thing_may_be_imported_again() -> None:
    registry: Registry[object] = Registry("objective", {})
    registry.register("a")(thing)
    registry.register("a")(thing)
    with pytest.raises(InputError, match="an objective named 'a' already exists"):
        registry.register("a")(other)


def test_a_plugin_cannot_take_the_name_of_a_built_in_that_was_not_imported_yet() -> None:
    registry: Registry[object] = Registry("aggregator", {"max": "its2clr.somewhere"})
    with pytest.raises(InputError, match="its2clr has an aggregator named 'max'"):
        registry.register("max")(thing)


def test_a_built_in_is_imported_when_it_is_asked_for(tmp_path, monkeypatch) -> None:
    (tmp_path / "lazy_builtin.py").write_text("import lazy_registry\n\n@lazy_registry.R.register('x')\ndef x(): ...\n")
    (tmp_path / "lazy_registry.py").write_text(
        "from its2clr.registry import Registry\nR = Registry('thing', {'x': 'lazy_builtin'})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import lazy_registry  # type: ignore[import-not-found]

    assert "lazy_builtin" not in sys.modules
    assert lazy_registry.R.find("x").__name__ == "x"


def test_hints_and_short_lists() -> None:
    assert did_you_mean("Epoch", ["epochs", "seed"]) == ", did you mean 'epochs'?"
    assert did_you_mean("zzz", ["epochs", "seed"]) == ""
    assert did_you_mean("zzz", ["epochs", "seed"], else_list=True) == " (known: epochs, seed)"
    assert shortened([1, 2, 3], most=3) == "1, 2, 3"
    assert shortened([1, 2, 3, 4], most=3) == "1, 2, 3 and 1 more"
    assert shortened_lines(["a", "b"], most=2) == ["a", "b"]
    assert shortened_lines(["a", "b", "c"], most=1, more="more notes") == ["a", "and 2 more notes"]

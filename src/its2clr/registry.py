"""A registry of things that settings choose by name: aggregators, objectives, pretraining methods."""

import importlib
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from its2clr.errors import InputError
from its2clr.wording import did_you_mean

T = TypeVar("T")
Registered = TypeVar("Registered")


class Registry(Generic[T]):
    """Things of one kind by name. Built-in ones are imported when first used.

    Args:
        kind: Their name in messages, such as "aggregator".
        built_in: Name and module of each built-in one; importing the module registers it.

    Example:
        >>> colours: Registry[int] = Registry("colour", {})
        >>> _ = colours.register("red")(1)
        >>> colours.find("red"), colours.names()
        (1, ['red'])
    """

    def __init__(self, kind: str, built_in: Mapping[str, str]) -> None:
        self._kind = kind
        self._built_in = built_in
        self._known: dict[str, T] = {}

    def register(self, name: str) -> Callable[[Registered], Registered]:
        """Decorator that makes a class or function available under a name; the package and plugins both use it.

        Raises:
            InputError: The name is already taken.
        """

        def add(thing: Registered) -> Registered:
            taken = self._known.get(name)
            if taken is not None and _origin(taken) != _origin(thing):
                raise InputError(f"a{_n(self._kind)} {self._kind} named {name!r} already exists: {_origin(taken)}")
            if taken is None and self._built_in.get(name, _module(thing)) != _module(thing):
                raise InputError(f"its2clr has a{_n(self._kind)} {self._kind} named {name!r}; choose another name")
            self._known[name] = thing  # type: ignore[assignment]
            return thing

        return add

    def names(self) -> list[str]:
        """Every name that `find` knows, sorted."""
        return sorted({*self._known, *self._built_in})

    def find(self, name: str, also: str = "") -> T:
        """What is registered under a name.

        Args:
            name: The name.
            also: What else the setting accepts, for the message.

        Raises:
            InputError: The name is unknown; the message gives the closest one.
        """
        if name not in self._known:
            if name not in self._built_in:
                known = ", ".join(self.names())
                raise InputError(
                    f"unknown {self._kind} {name!r}{did_you_mean(name, self.names())} (known: {known}{also})"
                )
            importlib.import_module(self._built_in[name])
        return self._known[name]


def _origin(thing: object) -> str:
    return f"{_module(thing)}.{getattr(thing, '__qualname__', thing)}"


def _module(thing: object) -> str:
    return str(getattr(thing, "__module__", ""))


def _n(word: str) -> str:
    return "n" if word[0] in "aeiou" else ""

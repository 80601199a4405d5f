"""Build a network from a description in a file, with no more memory than the weights beside it justify.

A few words of a description can ask for any size: `layers: [2000, 2000]` takes gigabytes before anything is compared
with the weights. Here every tensor is counted before it is made.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from its2clr.errors import InputError

# What a constructor may make beyond the weights: starting values, tables that are not saved (timm: up to four times).
_TIMES = 8
_MORE_VALUES = 2**24
_MORE_TENSORS = 2**10


class _TooLargeError(Exception):
    """More was asked for than the weights justify."""


@contextmanager
def bounded_by(tensors: Mapping[str, Tensor], path: str | Path) -> Iterator[None]:
    """Refuse to build a network that is much larger than the weights it is to be given.

    Args:
        tensors: The weights.
        path: Their file, for the error.

    Raises:
        InputError: The network is larger.
    """
    try:
        with _Counted(sum(tensor.numel() for tensor in tensors.values()), len(tensors)):
            yield
    except (_TooLargeError, InputError) as error:
        if not isinstance(error, _TooLargeError) and not isinstance(error.__cause__, _TooLargeError):
            raise
        raise InputError(
            f"{path}: these weights do not fit their description, which asks for a far larger network; it was not built"
        ) from error


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts tensors and their values before they are made; each operation is first tried without memory."""

    def __init__(self, values: int, tensors: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values = _TIMES * values + _MORE_VALUES
        self._tensors = _TIMES * tensors + _MORE_TENSORS

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        returns = func._schema.returns  # noqa: SLF001 - where torch says what is in place, a view or a number
        if any("Tensor" in str(one.type) and one.alias_info is None for one in returns):
            self._count(func, args, kwargs)
        return func(*args, **kwargs)

    def _count(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        def without_memory(value: Any) -> Any:
            return tree_map_only(Tensor, lambda tensor: tensor.to("meta"), value)

        where = {"device": torch.device("meta")} if "device" in kwargs else {}
        try:
            made = func(*without_memory(args), **{**without_memory(kwargs), **where})
        except (NotImplementedError, RuntimeError):  # its size depends on the values, so it is not above theirs
            return
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._values -= tensor.numel()
                self._tensors -= 1
        if self._values < 0 or self._tensors < 0:
            raise _TooLargeError

"""Encoded tiles of one slide, kept in a nameless temporary file: memory does not grow with the slide."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, overload


class Spool(Sequence[bytes]):
    """A list of bytes that lies on disk; what it holds vanishes with it, even when the process is killed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder, prefix=".", suffix=".part")  # noqa: SIM115 - closed by __exit__
        self._end = 0
        self._places: list[tuple[int, int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, content: bytes) -> None:
        """Add one at the end."""
        self._file.seek(self._end)
        self._file.write(content)
        self._places.append((self._end, len(content)))
        self._end += len(content)

    def arrange(self, order: Sequence[int]) -> None:
        """Put them in another order: the one that is now `order[0]` comes first."""
        self._places = [self._places[number] for number in order]

    def __len__(self) -> int:
        """How many were added."""
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        """Read one back, or several."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        start, size = self._places[index]
        self._file.seek(start)
        return self._file.read(size)

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
        self._ends = [0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, content: bytes) -> None:
        """Add one at the end."""
        self._file.seek(self._ends[-1])
        self._file.write(content)
        self._ends.append(self._ends[-1] + len(content))

    def __len__(self) -> int:
        """How many were added."""
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        """Read one back, or several."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        start, end = self._ends[index % len(self)], self._ends[index % len(self) + 1]
        self._file.seek(start)
        return self._file.read(end - start)

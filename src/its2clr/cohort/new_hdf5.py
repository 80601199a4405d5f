"""Write HDF5 files that appear whole, also where the disk is full.

HDF5 does not survive a write that fails: closing the file fails too, and the process crashes later. So HDF5 is given a
file whose writes never fail: after the first that does, it takes everything and keeps nothing. The error is raised when
HDF5 has closed the file.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py

from its2clr.files import atomic_path
from its2clr.signals import interrupts_wait


@contextmanager
def new_hdf5(path: str | Path, needs: int = 0) -> Iterator[h5py.File]:
    """Yield a new HDF5 file to write into; it appears whole or not at all.

    Ctrl-C waits until the block ends, since it could end a write of HDF5 in the middle.

    Args:
        path: The file.
        needs: The bytes it will have at least.

    Raises:
        DiskFullError: There is no room for it.
        OSError: It cannot be written for another reason.
    """
    with interrupts_wait(), atomic_path(path, needs) as temporary, temporary.open("w+b", buffering=0) as raw:
        kept = _Kept(raw.fileno())
        try:
            with h5py.File(kept, "w") as file:
                yield file
        finally:
            if kept.error is not None:
                raise kept.error


class _Kept:
    """A file as h5py wants it, which keeps the error of its first failed write instead of raising it."""

    def __init__(self, number: int) -> None:
        self._number, self._place, self._end = number, 0, 0
        self.error: OSError | None = None

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._end}[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def read(self, size: int) -> bytes:
        found = os.pread(self._number, size, self._place).ljust(size, b"\0")
        self._place += size
        return found

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view[:] = self.read(len(view))
        return len(view)

    def write(self, content: Any) -> int:
        left = memoryview(content).cast("B")
        size = len(left)
        try:
            while left and self.error is None:
                done = os.pwrite(self._number, left, self._place)
                self._place, left = self._place + done, left[done:]
        except OSError as error:
            self.error = error
        self._place += len(left)
        self._end = max(self._end, self._place)
        return size

    def truncate(self, size: int | None = None) -> int:
        self._end = self._place if size is None else size
        try:
            if self.error is None:
                os.ftruncate(self._number, self._end)
        except OSError as error:
            self.error = error
        return self._end

    def flush(self) -> None:
        """Nothing is held back."""

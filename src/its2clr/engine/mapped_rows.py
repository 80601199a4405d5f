"""Rows in files mapped into memory, for what does not fit there; pages that were read do not fill memory either.

The system counts a page of a mapped file as memory of the process from its first use on. Without `give_back`, whoever
reads 100 GB of rows would seem to hold 100 GB, and would be stopped where memory is limited (Slurm, containers).
"""

import mmap
import tempfile
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from its2clr.files import disk_full_said, reserve

MOST_RESIDENT = 2**30
"""Bytes of mapped files, those of libraries among them, that a process may hold in memory."""
ROWS_AT_ONCE = 2**14
"""Rows that are looked at together where all of them are looked at."""
_mapped: WeakSet[mmap.mmap] = WeakSet()


def map_rows(
    file: Any, dtype: npt.DTypeLike, shape: tuple[int, ...], mode: Literal["c", "r+"] = "c"
) -> "np.memmap[Any, Any]":
    """The rows of a file as an array.

    Args:
        file: Path, or an open file.
        dtype: Type of the values.
        shape: Shape of the array.
        mode: "c" for rows that are only read, "r+" for those that are written too.
    """
    rows: np.memmap[Any, Any] = np.memmap(file, dtype=dtype, mode=mode, shape=shape)
    _mapped.add(rows._mmap)  # type: ignore[attr-defined]  # noqa: SLF001 - numpy has no other way to advise
    return rows


def new_rows(shape: tuple[int, ...], dtype: npt.DTypeLike, folder: Path) -> npt.NDArray[Any]:
    """Rows of zeros in a file without a name, which is gone with the array or the process.

    Raises:
        DiskFullError: The folder has no room for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    with disk_full_said(folder / "features", nbytes), tempfile.TemporaryFile(dir=folder) as file:
        reserve(file, nbytes)
        return map_rows(file, dtype, shape, "r+")


def give_back() -> None:
    """Let go of the pages of all mapped rows if they are many; they are still in their files."""
    if _mapped and resident_pages() * mmap.PAGESIZE > MOST_RESIDENT:
        for rows in list(_mapped):
            rows.madvise(mmap.MADV_DONTNEED)


def resident_pages() -> int:
    """Pages of mapped files that this process holds in memory; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[2])
    except OSError:
        return 0

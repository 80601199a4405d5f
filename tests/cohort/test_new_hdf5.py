"""HDF5 files where the disk is full, and where someone presses Ctrl-C."""

import signal
import subprocess
import sys

import h5py
import numpy as np
import pytest

from its2clr.cohort.new_hdf5 import new_hdf5

FILLS_UP = """
import resource, sys
from pathlib import Path
import numpy as np
from its2clr.cohort.tiles import read_tiles, write_tile_file
from its2clr.errors import DiskFullError

path, outcomes = Path(sys.argv[1]), []
for limit in [*range(0, 60_000, 1024), resource.RLIM_INFINITY]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        write_tile_file(path, [b"x" * 1500] * 20, np.zeros((20, 2)), [f"tile {i}" for i in range(20)], bag_id="b",
            tile_size=8, tile_size_level0=8, mpp=1.0, source="", encoding="png", attributes={"more": "text" * 200})
        outcomes.append(len(read_tiles(path)))
        path.unlink()
    except DiskFullError:
        outcomes.append("full")
    assert not list(path.parent.iterdir())
first = outcomes.index(20)
assert first > 30 and set(outcomes[:first]) == {"full"} and set(outcomes[first:]) == {20}
"""


def test_running_out_of_room_at_any_place_is_an_error_and_no_crash(tmp_path):
    """One process fails at every place of a file; HDF5 must not remember it and crash, then or at the end."""
    words = [sys.executable, "-c", FILLS_UP, str(tmp_path / "b.h5")]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_ctrl_c_waits_until_the_file_is_whole(tmp_path):
    def write():
        with new_hdf5(tmp_path / "a.h5") as file:
            signal.raise_signal(signal.SIGINT)
            file["x"] = np.arange(100_000)

    with pytest.raises(KeyboardInterrupt):
        write()
    with h5py.File(tmp_path / "a.h5") as file:
        assert (file["x"][:] == np.arange(100_000)).all()


def test_other_errors_leave_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), new_hdf5(tmp_path / "a.h5") as file:
        file["x"] = 1 / 0
    assert not list(tmp_path.iterdir())

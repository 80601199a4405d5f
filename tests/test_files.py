"""Files appear whole: on a full disk, after a power cut, and beside other processes."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import SafetensorError

from its2clr import files
from its2clr.errors import DiskFullError
from its2clr.files import (
    atomic_path,
    damage_said,
    is_there,
    read_metrics,
    remove_half_written,
    reserve,
    temporary_path,
    write_text,
)

FULL = OSError(errno.ENOSPC, "No space left on device")


def killed_while_writing(path):
    """The temporary file of a process that was killed while it wrote a file."""
    code = (
        "import os, sys; from its2clr.files import atomic_path\n"
        "with atomic_path(sys.argv[1]) as path:\n"
        "    path.write_text('half'); print(path, flush=True); os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL
    left = Path(ended.stdout.strip())
    assert left.read_text() == "half"
    return left


def test_only_what_dead_processes_were_writing_is_removed(tmp_path):
    dead = killed_while_writing(tmp_path / "deep" / "a.txt")
    process = re.search(r"-(\d+)-", dead.name)[0]
    folder = dead.with_name(dead.name.replace("a.txt", "export"))
    folder.mkdir()
    (folder / "weights").touch()
    living = temporary_path(tmp_path / "a.txt")
    elsewhere, long_ago = (dead.with_name(f".{name}.000000{process}0123abcd.part") for name in ("b.txt", "c.txt"))
    older_version = tmp_path / ".d.txt.12-0123abcd.part"
    of_the_user = tmp_path / ".mine.part"
    for path in (living, elsewhere, long_ago, older_version, of_the_user):
        path.touch()
    os.utime(long_ago, (time.time() - 90_000,) * 2)
    os.utime(of_the_user, (0, 0))
    remove_half_written(tmp_path, below=False)
    assert dead.exists()
    remove_half_written(tmp_path)
    assert set(tmp_path.rglob(".*.part")) == {living, elsewhere, older_version, of_the_user}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_killed_process_wrote_is_removed_before_its_parent_asks(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and its number is still taken
        left = temporary_path(tmp_path / "a.txt")
        left = left.with_name(left.name.replace(f"-{os.getpid()}-", f"-{child.pid}-"))
        left.touch()
        remove_half_written(tmp_path)
        assert not left.exists()


def test_a_path_that_no_file_can_have_is_not_there(tmp_path):
    assert is_there(tmp_path)
    assert not is_there(tmp_path / "a")
    assert not is_there(tmp_path / ("a" * 300))


def test_content_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    done = []

    def fsync(number):
        done.append(Path(f"/proc/self/fd/{number}").readlink())

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", lambda self, target: (done.append("rename"), self.rename(target)))
    with atomic_path(tmp_path / "a.txt") as temporary:
        temporary.write_text("whole")
    assert done == [temporary, "rename", tmp_path]


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        OSError(errno.EFBIG, "File too large"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("write failed: errno = 28, error message = 'No space left on device'"),
    ],
)
def test_a_full_disk_is_one_message_and_leaves_what_was_there(tmp_path, error):
    write_text(tmp_path / "a.txt", "before")

    def write():
        with atomic_path(tmp_path / "a.txt") as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(DiskFullError, match=rf"{tmp_path}: [a-z ]+ while writing a.txt.*the same command") as raised:
        write()
    assert ("iB free there, it needs more" in str(raised.value)) == ("No space left" in str(error))
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "before"


def test_other_errors_are_not_taken_for_a_full_disk(tmp_path):
    for error in (OSError(errno.EACCES, "Permission denied"), ValueError("no")):
        with pytest.raises(type(error)) as raised, atomic_path(tmp_path / "a.txt"):
            raise error
        assert raised.value is error


def test_what_cannot_fit_is_not_begun(tmp_path, monkeypatch):
    room = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: room)
    begun = []
    with pytest.raises(DiskFullError, match=r"it needs 2 MiB, 1 MiB free there"), atomic_path(tmp_path / "a", 2**21):
        begun.append(True)
    assert not begun
    with atomic_path(tmp_path / "a", 2**20) as temporary:
        temporary.touch()


def test_a_reserved_file_has_its_space(tmp_path):
    with (tmp_path / "a").open("wb") as file:
        reserve(file, 2**20)
    status = (tmp_path / "a").stat()
    assert status.st_size == 2**20
    assert status.st_blocks * 512 >= 2**20  # a file with holes has fewer


def test_want_of_memory_is_no_damage_of_the_file():
    with pytest.raises(MemoryError, match=r"^a\.safetensors: unable to mmap"), damage_said("a.safetensors: is damaged"):
        raise RuntimeError("unable to mmap 9 bytes: Cannot allocate memory (12)")


def test_the_first_file_written_into_a_folder_tidies_it(tmp_path):
    dead = killed_while_writing(tmp_path / "a.geojson")
    write_text(tmp_path / "b.geojson", "whole")
    assert not dead.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["b.geojson"]


def test_damaged_lines_of_metrics_are_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"epoch": 1}\n{"epoch": \xff}\n{"epoch": 3}\n{"ep')
    assert read_metrics(tmp_path) == [{"epoch": 1}, {"epoch": 3}]

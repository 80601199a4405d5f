"""Files that are never half-written: under a temporary name, brought to the disk, then renamed."""

import errno
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from its2clr.errors import DiskFullError, InputError, Its2clrError
from its2clr.wording import readable_size

_NO_ROOM = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
_TEMPORARY = re.compile(r"\..*\.(?:(?P<machine>[0-9a-f]{6})-)?(?P<process>\d+)-[0-9a-f]{8}\.part", re.DOTALL)
_LONGEST_REASON = 300
ABANDONED_SECONDS = 24 * 3600
"""A temporary file of another machine counts as left behind when nobody has written to it for this long."""


@contextmanager
def atomic_path(path: str | Path, needs: int = 0) -> Iterator[Path]:
    """Yield a temporary path in the same folder; rename it onto `path` on success, remove it on failure.

    The content is on the disk before it gets its name, so not even a power cut leaves a broken file under that name.

    Args:
        path: The file.
        needs: The bytes it will have at least; if there is less room, nothing is begun.

    Raises:
        DiskFullError: There is no room for it.
    """
    path = Path(path)
    with disk_full_said(path, needs):
        path.parent.mkdir(parents=True, exist_ok=True)
        room = shutil.disk_usage(path.parent)
        if room.total > 0 and needs > room.free:  # 0: a file system that does not know its size
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        temporary = temporary_path(path)
        try:
            yield temporary
            bring_to_disk(temporary)
            temporary.replace(path)
            bring_to_disk(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def temporary_path(path: Path) -> Path:
    """A new name beside a file or folder, to write it under; it says which process of which machine is writing.

    The first time that a process writes into a folder, it removes what killed processes left there.
    """
    _tidy(path.parent.absolute())
    return path.with_name(f".{path.name[:40]}.{_machine()}-{os.getpid()}-{secrets.token_hex(4)}.part")


@cache
def _tidy(folder: Path) -> None:
    """Once per process, since a folder of many bags takes a while to list."""
    remove_half_written(folder, below=False)


def bring_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, would survive a power cut."""
    if os.name != "posix" and path.is_dir():  # only POSIX can open a folder
        return
    number = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:  # some file systems cannot do it for folders
            raise
    finally:
        os.close(number)


def reserve(file: IO[bytes], nbytes: int) -> None:
    """Give a new file this size, and take its space: a mapped file without room would kill the process (SIGBUS)."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, nbytes)
    else:
        file.truncate(nbytes)


@contextmanager
def disk_full_said(path: Path, needs: int = 0) -> Iterator[None]:
    """Where writing a file fails for want of room, raise an error that says where, and how much is free.

    Args:
        path: The file that is written in the block.
        needs: The bytes it will have at least, where that is known.

    Raises:
        DiskFullError: There is no room for it.
    """
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        number = _no_room(error)
        if number is None:
            raise
        room = ""
        if number == errno.ENOSPC:
            with suppress(OSError):
                free = f"{readable_size(shutil.disk_usage(path.parent).free)} free there"
                room = f" (it needs {readable_size(needs)}, {free})" if needs else f" ({free}, it needs more)"
        raise DiskFullError(
            f"{path.parent}: {os.strerror(number).lower()} while writing {path.name}{room}; make room, then the same "
            "command goes on where it stopped"
        ) from error


@contextmanager
def damage_said(what: str, advice: str = "", raised: type[Exception] = InputError) -> Iterator[None]:
    """Where reading a file fails, whatever the library raises, raise one error that says which file and why.

    Args:
        what: The file and what is wrong with it, such as `runs/a/state.json: is damaged`.
        advice: What to do.
        raised: The kind of error.
    """
    try:
        yield
    except raised:
        raise
    except Its2clrError as error:
        raise raised(str(error)) from error
    except Exception as error:
        words = " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
        if os.strerror(errno.ENOMEM) in words:  # said by the system: the file may be whole
            raise MemoryError(f"{what.partition(': ')[0]}: {words}") from error
        raise raised(f"{what} ({words}){advice and f'; {advice}'}") from error


def _no_room(error: Exception) -> int | None:
    """The number of the system's error that means no room, if it is one; libraries put its words into their own."""
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return error.errno
    return next((number for number in _NO_ROOM if os.strerror(number) in str(error)), None)


@cache
def _machine() -> str:
    """Stands for this machine since it was started, and for the space of process numbers, which containers have."""
    known = [platform.node()]
    with suppress(OSError):
        known.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
        known.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:6]


def remove_half_written(folder: str | Path, *, below: bool = True) -> None:
    """Remove what killed processes were writing; what a process may still be writing stays.

    Args:
        folder: The folder.
        below: Whether to look into all folders below it, too.
    """
    found = Path(folder).rglob(".*.part") if below else Path(folder).glob(".*.part")
    for path in list(found):
        named = _TEMPORARY.fullmatch(path.name)
        if named is None or _may_be_written(path, named["machine"], int(named["process"])):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _may_be_written(path: Path, machine: str | None, process: int) -> bool:
    if machine != _machine() or os.name != "posix":  # nobody here knows whether that process lives
        try:
            return time.time() - path.stat().st_mtime < ABANDONED_SECONDS
        except FileNotFoundError:
            return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return not _has_ended(process)


def _has_ended(process: int) -> bool:
    """Whether a process was killed but keeps its number until its parent asks, which in a container may take long."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux, or gone
        return False
    return status.rpartition(")")[2].split()[:1] in (["Z"], ["X"])


def write_text(path: str | Path, text: str) -> None:
    """Write a text file that is never half-written."""
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        name = text[max(0, error.start - 60) : error.end + 20].encode("ascii", "backslashreplace").decode()
        raise InputError(f"{path}: cannot hold a name that is not UTF-8 ({name!r}); rename that file") from error
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: str | Path, value: Any) -> None:
    """Write indented JSON to a file that is never half-written."""
    write_text(path, json.dumps(value, indent=2, allow_nan=True) + "\n")


def read_json(path: str | Path, kind: type = dict) -> Any:
    """Read a JSON file that holds an object, or another kind of value.

    Raises:
        InputError: It is damaged, or holds another kind of value.
        OSError: It is missing, or cannot be read.
    """
    content = Path(path).read_bytes()
    with damage_said(f"{path}: is no whole JSON file"):
        value = json.loads(content.decode())
        if not isinstance(value, kind):
            raise InputError(f"{path}: is damaged, it holds a {type(value).__name__} instead of a {kind.__name__}")
    return value


def hash_files(*paths: Path) -> str:
    """Short hash of the content of some files."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while part := file.read(2**24):
                digest.update(part)
    return digest.hexdigest()[:16]


def is_there(path: Path) -> bool:
    """Whether a path that a user wrote is there; one that no file can have, such as one too long, is not."""
    try:
        return path.exists()
    except OSError:
        return False


def user_cache() -> Path:
    """Where its2clr keeps what it can make or fetch again."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME", tempfile.gettempdir()), ".cache")
    return Path(cache) / "its2clr"


def stamp(path: Path) -> list[int]:
    """Size, time of change and inode of a file: as long as they stay, so does the content."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def record(path: Path) -> dict[str, Any]:
    """What is noted about a file, or a folder of files, to know later whether it is still the same."""
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    names = hashlib.sha256("\n".join(str(one.relative_to(path)) for one in files).encode()).hexdigest()[:16]
    return {"stamps": [stamp(one) for one in files], "content": f"{names}-{hash_files(*files)}"}


def is_as_recorded(path: Path, recorded: dict[str, Any]) -> bool:
    """Whether a file or folder holds what it held when it was recorded; it is read only where a stamp has changed."""
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    stamps: bool = [stamp(one) for one in files] == recorded["stamps"]
    return stamps or record(path)["content"] == recorded["content"]


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """What a run logged in metrics.jsonl, epoch by epoch; a line that is incomplete or damaged is skipped."""
    path = run / "metrics.jsonl"
    entries = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return entries

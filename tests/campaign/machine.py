"""Start commands in forked processes: cheap, apart from each other, watched, and killed where the campaign wants it."""

import atexit
import gc
import importlib
import os
import random
import resource
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.end_to_end.warm import LIBRARIES

HANG_SECONDS = 60
"""A command hangs if it does nothing for so long, or computes so much longer than it should.

Waiting for a processor that others use is neither.
"""
PROGRESS = 0.5
"""Seconds of computing in that time that are something."""
MOST_MEMORY = 4 * 10**9
"""No input may make a command take more bytes."""
OUTCOMES = (0, 1, 2)
"""Exit codes of a command that ended as it should; 1 is `doctor` that found something."""
_FILE_OPERATIONS = ("replace", "rename", "fsync", "unlink", "mkdir")


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: Exit code; minus the signal that killed it.
        output: What it printed, errors included.
        seconds: How long it took.
        peak: Most bytes that it, or a process it started, held at once.
        hung: Whether it was killed because it took too long.
        operations: File operations it did, where they were counted.
    """

    code: int
    output: str
    seconds: float
    peak: int
    hung: bool = False
    operations: int = 0

    def complaint(self) -> str | None:
        """What was wrong with this end, in one line; None if nothing was."""
        tail = self.output[-2000:]
        if self.hung:
            return f"hung for {self.seconds:.0f} s: {tail}"
        if "Traceback (most recent call last)" in self.output:
            return f"traceback: {tail}"
        if self.code not in OUTCOMES:
            return f"exit code {self.code}: {tail}"
        if self.peak > MOST_MEMORY:
            return f"took {self.peak / 1e9:.1f} GB: {tail}"
        return None


def warm_up() -> None:
    """Import what commands use, so that a fork has it already."""
    for name in LIBRARIES:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a collection would touch, and so copy, all the memory that a fork shares


def fork(
    work: Callable[[], int],
    folder: Path,
    *,
    limit: float = HANG_SECONDS,
    kill_after: float | None = None,
) -> Ended:
    """Do work in a process of its own, with a working directory, home and output of its own in a folder.

    Args:
        work: Gives the exit code.
        folder: Where it starts, with an empty folder `here` as working directory.
        limit: Seconds of computing after which it hangs.
        kill_after: Seconds after which it and all that it started are killed.
    """
    here, said = folder / "here", folder / "said.txt"
    here.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        _become(here, said, folder)
        _end(work)
    hung, watch = False, _Watch(child, limit)
    while True:
        pid, status, used = os.wait4(child, os.WNOHANG)
        if pid:
            break
        passed = time.monotonic() - begun
        hung = watch.hangs(passed)
        if hung or (kill_after is not None and passed > kill_after):
            _kill_group(child)
            _, status, used = os.wait4(child, 0)
            break
        time.sleep(min(0.02, passed / 10 + 0.0005))
    _kill_group(child)  # what it started and left behind, such as workers of a process that was killed
    seconds = time.monotonic() - begun
    code = os.waitstatus_to_exitcode(status)
    return Ended(code, said.read_text(errors="replace"), seconds, used.ru_maxrss * 1024, hung, _counted(folder))


def its2clr(
    words: Sequence[object],
    folder: Path,
    *,
    limit: float = HANG_SECONDS,
    kill_after: float | None = None,
    kill_at: int | None = None,
    file_size: int | None = None,
) -> Ended:
    """Run `its2clr WORDS`.

    Args:
        words: The command.
        folder: Where it starts, and its home.
        limit: Seconds after which it hangs.
        kill_after: Seconds after which it is killed.
        kill_at: The file operation at which it is killed: before it if the number is even, after it if odd.
        file_size: Most bytes that a file may have; the system refuses to write more.
    """

    def work() -> int:
        _watch_files(folder, kill_at)
        if file_size is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
        sys.argv[1:] = [str(word) for word in words]
        try:
            runpy.run_module("its2clr", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return fork(work, folder, limit=limit, kill_after=kill_after)


class _Watch:
    """Sees whether a process and all that it started hang: they wait for ever, or compute for ever."""

    def __init__(self, leader: int, limit: float) -> None:
        self._leader, self._limit = leader, limit
        self._asked = self._since = self._used = 0.0

    def hangs(self, now: float) -> bool:
        if now - self._asked < 1:
            return False
        self._asked, used = now, _computed(self._leader)
        if used > self._used + PROGRESS:
            self._since, self._used = now, used
        return used > self._limit or now - self._since > HANG_SECONDS


def _computed(leader: int) -> float:
    """Seconds that a process and its descendants computed."""
    try:
        first = psutil.Process(leader)
        return sum(sum(one.cpu_times()[:4]) for one in [first, *first.children(recursive=True)])
    except psutil.NoSuchProcess:  # one of them ended just now: ask again
        return 0.0


def outside(folder: Path) -> list[str]:
    """Files that commands started in a folder left in their working directory or home."""
    return [str(path) for name in ("here", "home") for path in (folder / name).rglob("*") if path.is_file()]


def draw_of(seed: int, *names: object) -> random.Random:
    """Random choices that depend on names alone."""
    return random.Random(f"{seed} {names}")


def _become(here: Path, said: Path, folder: Path) -> None:
    os.setsid()
    home = folder / "home"
    home.mkdir(exist_ok=True)
    (folder / "tmp").mkdir(exist_ok=True)
    os.environ.update(HOME=str(home), TMPDIR=str(folder / "tmp"), TERM="dumb", COLUMNS="120", OMP_NUM_THREADS="1")
    os.chdir(here)
    place = os.open(said, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), place, place)):
        os.dup2(file, number)
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.default_int_handler if name == signal.SIGINT else signal.SIG_DFL)


def _end(work: Callable[[], int]) -> None:
    code = 1
    try:
        code = work()
    except BaseException:  # noqa: BLE001 - this is what the campaign looks for
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _watch_files(folder: Path, kill_at: int | None) -> None:
    """Count the file operations of this process, and die at one of them."""
    counter = folder / "operations"
    done = 0

    def watched(operation: Callable[..., object]) -> Callable[..., object]:
        def act(*arguments: object, **options: object) -> object:
            nonlocal done
            done += 1
            if kill_at is not None and done == kill_at // 2 + 1 and kill_at % 2 == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            result = operation(*arguments, **options)
            if kill_at is not None and done == kill_at // 2 + 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return act

    for name in _FILE_OPERATIONS:
        setattr(os, name, watched(getattr(os, name)))
    me = os.getpid()
    atexit.register(lambda: counter.write_text(str(done)) if os.getpid() == me else None)


def _counted(folder: Path) -> int:
    counter = folder / "operations"
    counted = int(counter.read_text()) if counter.is_file() else 0
    counter.unlink(missing_ok=True)
    return counted


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return

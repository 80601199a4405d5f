"""Disks that fill up: one line and exit code 2, and with more room the same command ends with the same results.

The disk is a tmpfs of its own. Where none can be mounted, the size of files is limited instead (RLIMIT_FSIZE), which
the system says in other words but fails in the same places.
"""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.campaign.content import content, differences, half_written
from tests.campaign.kills import SHORT, Case, Undisturbed, cases, undisturbed
from tests.campaign.machine import HANG_SECONDS, Ended, draw_of, its2clr, outside
from tests.campaign.places import Places
from tests.campaign.tally import Clock, Part

PLENTY = 256 * 2**20


def full_disk(places: Places, part: Part, clock: Clock, seed: int, *, short: bool = False) -> None:
    """Fill disks until the time is up; each command has its turn."""
    chosen = [case for case in cases(places) if case.name != "tune" and (not short or case.name in SHORT)]
    known: dict[str, tuple[Undisturbed, int, int]] = {}
    number = 0
    part.notes |= {"tmpfs": _can_mount(places), "disks_that_filled_up": 0}
    draw_of(seed, "full disk").shuffle(chosen)
    while not clock.over() or number == 0:
        case = chosen[number % len(chosen)]
        if case.name not in known:
            whole = undisturbed(case, places, part)
            files = [path.stat().st_size for path in (places.root / "whole" / "out").rglob("*") if path.is_file()]
            known[case.name] = whole, sum(files), max(files)
        _one_disk(case, known[case.name], places, part, seed, number)
        number += 1


def _one_disk(
    case: Case, known: tuple[Undisturbed, int, int], places: Places, part: Part, seed: int, number: int
) -> None:
    whole, total, largest = known
    draw = draw_of(seed, "full disk", number, case.name)
    folder, limit = places.new("disk"), HANG_SECONDS + 3 * whole.seconds
    mounted = part.notes["tmpfs"] and draw.random() < 0.75
    with _disk(folder / "disk", mounted=mounted) as resize:
        out = folder / "disk" / "out"
        if case.prepare:
            case.prepare(out)
        there = sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) if out.exists() else 0
        room = draw.randrange(4096, max(8192, int(1.2 * (total - there)))) if mounted else draw.randrange(64, largest)
        what = f"{case.name} (seed {seed}, {number}) with {room} bytes {'free' if mounted else 'per file'}"
        if mounted:
            resize(_blocks(out) + room)
        part.tried(case.name)
        _check_refusal(what, its2clr(case.words(out), folder, limit=limit, file_size=None if mounted else room), part)
        if mounted:
            resize(PLENTY)
        ended = its2clr(case.words(out), folder, limit=limit)
        if not part.ended(what, ended):
            return
        if ended.code:
            part.failed(what, f"refused to go on, exit code {ended.code}: {ended.output[-1000:]}")
        elif changed := differences(whole.content, content(out)):
            part.failed(what, f"result changed: {changed[:8]}")
        elif left := half_written(out):
            part.failed(what, f"outside: half written files stay: {left[:4]}")
        if strange := outside(folder):
            part.failed(what, f"outside: {strange[:4]}")


def _check_refusal(what: str, ended: Ended, part: Part) -> None:
    """It fitted, or there is one line that says there was no room."""
    if not part.ended(what, ended) or ended.code == 0:
        return
    part.notes["disks_that_filled_up"] += 1
    errors = [line for line in ended.output.splitlines() if line.startswith("error: ")]
    if len(errors) != 1 or not any(words in errors[0] for words in ("no space left", "file too large")):
        part.failed(what, f"other: did not say that there was no room: {ended.output[-600:]}")


def _can_mount(places: Places) -> bool:
    folder = places.new("disk")
    words = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    mounted = (
        shutil.which("mount") is not None and subprocess.run(words, capture_output=True, check=False).returncode == 0
    )
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)
    return mounted


@contextmanager
def _disk(folder: Path, *, mounted: bool) -> Iterator[Callable[[int], object]]:
    folder.mkdir()
    if not mounted:
        yield lambda size: None
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={PLENTY}", "tmpfs", str(folder)], check=True)
    try:
        yield lambda size: subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _blocks(out: Path) -> int:
    """What is there already takes whole pages."""
    return sum(4096 + path.stat().st_size // 4096 * 4096 for path in [out, *out.rglob("*")] if path.exists())

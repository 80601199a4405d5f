"""Files that are never half-written: they are written under a temporary name, then renamed."""

import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; rename it onto `path` on success, remove it on failure."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file that is never half-written."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write indented JSON to a file that is never half-written."""
    write_text(path, json.dumps(value, indent=2, allow_nan=True) + "\n")


def read_json(path: str | Path) -> Any:
    """Read a JSON file."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


def remove_half_written(folder: str | Path) -> None:
    """Remove temporary files that a killed process left behind."""
    for path in Path(folder).rglob(".*.part"):
        path.unlink(missing_ok=True)


def hash_files(*paths: Path) -> str:
    """Short hash of the content of some files."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while part := file.read(2**24):
                digest.update(part)
    return digest.hexdigest()[:16]


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
    """What a run logged in metrics.jsonl, epoch by epoch; a line that a killed run left incomplete is skipped."""
    path = run / "metrics.jsonl"
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return entries

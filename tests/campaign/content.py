"""What a folder of results says, without what differs from run to run: times, folders, machine."""

import hashlib
import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pandas as pd
from safetensors import safe_open

TIMES = {
    "path",
    "seconds",
    "time",
    "created",
    "memory",
    "peak_memory",
    "duration",
    "date",
    "started",
    "finished",
    "modified",
}
"""Keys of JSON that say where, when, and how long; not what."""
_SKIPPED = re.compile(
    r"(^|/)(content\.json|events\.out\.tfevents.*|report\.html|.*\.lock|lock|study\.db|.*\.log|journal.*)$"
)


def content(folder: Path) -> dict[str, str]:
    """A digest per file; times, TensorBoard's events and the page of the report are left out."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    kept = [name for name in names if not _SKIPPED.search(name)]
    return {name: _digest(name, (folder / name).read_bytes(), folder) for name in kept}


def half_written(folder: Path) -> list[str]:
    """Temporary files that were left."""
    return [str(path) for path in folder.rglob(".*.part")]


def differences(expected: dict[str, str], found: dict[str, str]) -> list[str]:
    """Files that are not the same."""
    names = sorted(expected.keys() | found.keys())
    return [name for name in names if expected.get(name) != found.get(name)]


def _digest(name: str, value: bytes, folder: Path) -> str:
    suffix = Path(name).suffix
    if Path(name).name == "state.json":  # the rest are times and sizes of files that are compared themselves
        value = json.dumps(sorted(json.loads(value)["stages"])).encode()
    elif suffix in {".json", ".jsonl", ".ipynb"}:
        lines = value.splitlines() if suffix == ".jsonl" else [value]
        value = "\n".join(json.dumps(_timeless(json.loads(line)), sort_keys=True) for line in lines).encode()
    elif suffix == ".csv" and b"seconds" in value.partition(b"\n")[0]:
        table = pd.read_csv(io.BytesIO(value))
        value = table[[name for name in table if not _is_time(str(name))]].to_csv().encode()
    elif suffix == ".parquet":
        value = pd.read_parquet(io.BytesIO(value)).to_csv().encode()
    elif suffix == ".safetensors":
        value = _tensors(folder / name)
    elif suffix in {".its2clr", ".zip"}:
        with zipfile.ZipFile(io.BytesIO(value)) as archive:
            members = {
                one: hashlib.sha256(archive.read(one)).hexdigest()
                for one in sorted(archive.namelist())
                if not one.endswith(".json")
            }
        value = json.dumps(members).encode()
    value = value.replace(str(folder).encode(), b"").replace(str(folder.parent).encode(), b"")
    value = re.sub(rb"(?<![\d.])\d+(\.\d+)? (s|seconds|min)\b", b"", value) if suffix in {".md", ".txt"} else value
    return hashlib.sha256(value).hexdigest()


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(one) for key, one in value.items() if not _is_time(key)}
    return [_timeless(one) for one in value] if isinstance(value, list) else value


def _is_time(key: str) -> bool:
    return key in TIMES or key.endswith(("seconds", "per_second")) or key == "wrote"


def _tensors(path: Path) -> bytes:
    digest = hashlib.sha256()
    with safe_open(path, framework="numpy") as file:
        for key in sorted(file.keys()):
            value = file.get_tensor(key)
            digest.update(f"{key} {value.shape} {value.dtype}".encode() + value.tobytes())
    return digest.digest()

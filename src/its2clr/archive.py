"""One file with several parts: an uncompressed zip archive with fixed times, so that equal content gives equal bytes.

Only parts with expected names are read, into memory; nothing is ever unpacked to disk or decompressed.
"""

import zipfile
from collections.abc import Mapping
from pathlib import Path

from its2clr.errors import InputError
from its2clr.files import atomic_path

_LONG_AGO = (1980, 1, 1, 0, 0, 0)  # the earliest time a zip archive can hold
_READABLE = 0o644 << 16
_UNIX = 3
LARGEST_JSON = 16 * 2**20


def write_archive(path: Path, parts: Mapping[str, bytes]) -> None:
    """Write parts, in their order, to an archive that is never half-written."""
    with atomic_path(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
        for name, content in parts.items():
            entry = zipfile.ZipInfo(name, _LONG_AGO)
            entry.create_system, entry.external_attr = _UNIX, _READABLE
            archive.writestr(entry, content)


def read_archive(path: Path, names: tuple[str, ...], advice: str, more: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Read an archive that must hold these parts.

    Args:
        path: The file.
        names: Names of the parts.
        advice: What the user can do if the file is damaged.
        more: Names of parts that it may hold too.

    Raises:
        InputError: The file is missing or damaged, or holds anything else.
    """
    if not path.is_file():
        raise InputError(f"{path}: there is no such file")
    try:
        with zipfile.ZipFile(path) as archive:
            found = _checked(path, archive.infolist(), names, more, advice)
            return {name: archive.read(name) for name in found}  # compares checksums
    except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: damaged, or not a model of its2clr ({error}); {advice}") from error


def _checked(
    path: Path, entries: list[zipfile.ZipInfo], names: tuple[str, ...], more: tuple[str, ...], advice: str
) -> list[str]:
    """The names of the parts, all of them expected."""
    found = [entry.filename for entry in entries]
    if missing := [name for name in names if name not in found]:
        raise InputError(f"{path}: not a model of its2clr, it has no {', '.join(missing)}; {advice}")
    if foreign := [name for name in found if name not in (*names, *more)]:
        listed = ", ".join(repr(name) for name in foreign[:3])
        raise InputError(f"{path}: holds parts that a model does not have ({listed}), so it is not read; {advice}")
    if len(found) > len(set(found)):
        raise InputError(f"{path}: holds a part twice, so it is not read; {advice}")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise InputError(f"{path}: {entry.filename} is compressed, which a model never is; {advice}")
        if entry.filename.endswith(".json") and entry.file_size > LARGEST_JSON:
            raise InputError(f"{path}: {entry.filename} is far too large ({entry.file_size} bytes); {advice}")
    return found

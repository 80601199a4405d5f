"""Files far away: what an address such as `s3://bucket/scans/case-1.svs` names becomes a file on this machine.

Addresses go through the program as paths: `Path("s3://bucket/case-1.svs")` loses a slash and nothing else, has name,
suffix and parent, and is no file of this machine. Only what a person names, on the command line or in a manifest, is
given to the functions here; an address that a cohort, run or feature file holds is never fetched.

A whole object is fetched into a cache whose size is bounded; what was used longest ago goes first. Its place there is
a hash of its address and of what the server says it is (ETag, size and time), asked each time: a changed object is
another one. A lock on its folder keeps an object while any process uses it.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import unquote

from its2clr.errors import InputError, extra_needed
from its2clr.files import atomic_path, read_json, temporary_path, user_cache, write_json
from its2clr.wording import readable_size

_ADDRESS = re.compile(r"(s3|gs|https?):/+(.*)", re.DOTALL)
_LOCK, _ABOUT = ".lock", ".about.json"
_CONNECT_SECONDS = 5
_RETRIES = 3
_AT_ONCE = 8
_PART = 8 * 2**20
_OURS = ("decoded", "content.json")  # what commands on this machine write into a cohort
_NO_CREDENTIALS = re.compile(r"/latest/|computeMetadata|token request", re.IGNORECASE)
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, as `aws configure export-credentials --format env` prints "
    "them, or AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to a key file, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
}
_held = ExitStack()  # the locks of folders in use until this process ends


class _Object(NamedTuple):
    """An object as its server describes it: its key, its size, and its ETag or else its time of change."""

    key: str
    size: int
    version: str


def is_far(path: str | Path) -> bool:
    """Whether a path is an address."""
    return _ADDRESS.match(str(path)) is not None


def address_of(path: str | Path) -> str:
    """The address that a path stands for, as a person writes it; any other path as it is."""
    found = _ADDRESS.match(str(path))
    return str(path) if found is None else f"{found[1]}://{found[2]}"


def spelled(text: str) -> str:
    """A text for a person, in which the addresses that went through paths have both slashes again."""
    return re.sub(r"\b(s3|gs|https?):/(?=[^/\s])", r"\1://", text)


def absolute(path: Path) -> Path:
    """The path from the root of this machine; an address stays."""
    return path if is_far(path) else path.absolute()


def below(folder: Path, name: str) -> Path:
    """What a table in a folder names: relative to it, or by an absolute path or an address."""
    return Path(name) if is_far(name) else absolute(folder) / name


def is_file(path: Path) -> bool:
    """Whether there is such a file, or such an object."""
    if not is_far(path):
        return path.is_file()
    try:
        return bool(stamp(path))
    except FileNotFoundError:
        return False


def is_folder(path: Path) -> bool:
    """Whether there is such a folder; far away, whether there are objects below the address."""
    return next(_list(path), None) is not None if is_far(path) else path.is_dir()


def files_below(folder: Path) -> list[Path]:
    """All files in a folder and the folders below it, sorted."""
    if is_far(folder):
        return sorted(Path(f"{_root(folder)}/{one.key}") for one in _list(folder))
    return sorted(path for path in folder.rglob("*") if path.is_file())


def files_in(folder: Path) -> list[Path]:
    """The files directly in a folder, sorted."""
    if is_far(folder):
        return [path for path in files_below(folder) if path.parent == folder]
    return sorted(path for path in folder.iterdir() if path.is_file())


def folders_in(folder: Path) -> list[Path]:
    """The folders directly in a folder, sorted, but hidden ones."""
    if is_far(folder):
        depth = len(folder.parts) + 1
        return sorted({Path(*path.parts[:depth]) for path in files_below(folder) if len(path.parts) > depth})
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def stamp(path: Path) -> tuple[int, str]:
    """Size and version of an object: as long as they stay, so does the content.

    Raises:
        FileNotFoundError: There is no such object.
        InputError: The server cannot be asked.
    """
    found = _describe(path)
    return found.size, found.version


@contextmanager
def local(path: Path) -> Iterator[Path]:
    """A file on this machine that may be read in the block: the path itself, or what is fetched from its address.

    Raises:
        FileNotFoundError: There is no such object.
        InputError: It cannot be fetched.
    """
    if not is_far(path):
        yield path
        return
    with _in_cache(path, {"": _describe(path)}) as place:
        yield place


def folder_here(path: Path) -> Path:
    """A folder on this machine, which stays until this process ends: the path itself, or all below its address.

    Raises:
        InputError: It cannot be fetched, or there is nothing.
    """
    if not is_far(path):
        return path
    start = len(_key(path)) + 1 if _key(path) else 0
    members = {one.key[start:]: one for one in _list(path)}
    members = {name: one for name, one in members.items() if name.split("/")[0] not in _OURS}
    if not members:
        raise InputError(f"{address_of(path)}: there is nothing below this address")
    return _held.enter_context(_in_cache(path, members))


@contextmanager
def _in_cache(path: Path, members: dict[str, _Object]) -> Iterator[Path]:
    """The place of some objects in the cache, by their names in it, fetched where they are missing; kept meanwhile."""
    about = [address_of(path), sorted((name, one.size, one.version) for name, one in members.items())]
    entry = _cache() / hashlib.sha256(json.dumps(about).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    place = entry / path.name
    while True:
        with _locked(entry, alone=False):
            missing = [name for name in members if not (place / name).is_file()]
            if not missing:
                os.utime(entry / _LOCK, ns=(time.time_ns(),) * 2)  # finer than the clock of the file system
                yield place
                return
        with _locked(entry, alone=True):
            _make_room(entry, address_of(path), sum(one.size for one in members.values()))
            _fetch_all(path, [(members[name], place / name) for name in missing if not (place / name).is_file()])


def _fetch_all(path: Path, wanted: Sequence[tuple[_Object, Path]]) -> None:
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        fetched = [threads.submit(_fetch, path, one, place) for one, place in wanted]
        try:
            for future in fetched:
                future.result()
        finally:
            threads.shutdown(cancel_futures=True)


def _fetch(path: Path, wanted: _Object, place: Path) -> None:
    address = f"{_root(path)}/{wanted.key}"
    with atomic_path(place, wanted.size) as temporary, _said(address):
        found = _obstore().get(_store(path), wanted.key)
        if _from_meta(found.meta) != wanted:
            raise InputError(f"{address}: changed while it was fetched; run the same command again")
        with temporary.open("wb") as file:
            for part in found.stream(min_chunk_size=_PART):
                file.write(part)
        if temporary.stat().st_size != wanted.size:
            raise InputError(f"{address}: ended after {temporary.stat().st_size} of {wanted.size} bytes")


def _make_room(entry: Path, address: str, nbytes: int) -> None:
    """Drop what was used longest ago, then note the size of what is going to be fetched, one process at a time."""
    limit = int(_setting("ITS2CLR_FAR_GB", 100) * 10**9)
    with _locked(_cache(), alone=True):
        others = [one for one in _cache().iterdir() if one.name[:1] != "." and one != entry]
        sizes = {one: _size(one) for one in others}
        for one in sorted(others, key=_last_used):
            if sum(sizes.values()) + nbytes <= limit:
                break
            if _drop(one):
                del sizes[one]
        if sum(sizes.values()) + nbytes > limit:
            used = f", {readable_size(sum(sizes.values()))} of them in use by commands that run" if sizes else ""
            message = f"needs {readable_size(nbytes)}, the cache {_cache()} may hold {readable_size(limit)}{used}"
            raise InputError(f"{address}: {message}; set ITS2CLR_FAR_GB to more, or use fewer --workers")
        write_json(entry / _ABOUT, {"address": address, "bytes": nbytes})


def _size(entry: Path) -> int:
    """What was fetched, and what commands wrote beside it."""
    with suppress(OSError, ValueError, KeyError):
        return int(read_json(entry / _ABOUT)["bytes"]) + sum(
            one.stat().st_size for one in entry.glob(f"*/{_OURS[0]}/**/*")
        )
    return 0


def _last_used(entry: Path) -> float:
    try:
        return (entry / _LOCK).stat().st_mtime
    except OSError:
        return 0.0


def _drop(entry: Path) -> bool:
    """Remove an entry of the cache, unless a process uses it."""
    try:
        with (entry / _LOCK).open("a") as file:
            _flock(file, alone=True, wait=False)
            away = temporary_path(entry)
            entry.rename(away)
    except OSError:  # in use
        return False
    shutil.rmtree(away, ignore_errors=True)
    return True


@contextmanager
def _locked(folder: Path, *, alone: bool) -> Iterator[None]:
    """Keep a folder of the cache, which is made if missing, or made anew if it is dropped meanwhile."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = (folder / _LOCK).open("a")
        except FileNotFoundError:
            continue
        with file:
            _flock(file, alone=alone, wait=True)
            if _last_inode(folder) == os.fstat(file.fileno()).st_ino:
                yield
                return


def _last_inode(folder: Path) -> int | None:
    try:
        return (folder / _LOCK).stat().st_ino
    except FileNotFoundError:
        return None


def _flock(file: IO[str], *, alone: bool, wait: bool) -> None:
    try:
        import fcntl
    except ImportError:  # no such locks on this system, which does not remove what is open
        return
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in {errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK}:  # else a file system without locks
            raise


def _cache() -> Path:
    return Path(os.environ.get("ITS2CLR_FAR_FOLDER") or user_cache() / "far").absolute()


def _setting(name: str, default: float) -> float:
    said = os.environ.get(name) or str(default)
    try:
        value = float(said)
    except ValueError:
        value = 0.0
    if not 0 < value < 10**9:
        raise InputError(f"{name} is {said!r}, expected a number above 0")
    return value


def _describe(path: Path) -> _Object:
    """What the server says of an object."""
    key = _key(path)
    if not key:
        raise InputError(f"{address_of(path)}: names no object, only where objects are")
    with _said(address_of(path)):
        store = _store(path)
        try:
            return _from_meta(_obstore().head(store, key))
        except FileNotFoundError:  # without words; those of the next answer say whether the bucket is there
            return _from_meta(_obstore().get(store, key).meta)


def _list(folder: Path) -> Iterator[_Object]:
    """All objects below an address, but hidden ones and those that no file can be called; a web server lists none."""
    if _root(folder).startswith("http"):
        return
    with _said(address_of(folder)):
        for part in _obstore().list(_store(folder), _key(folder) or None):
            for meta in part:
                names = str(meta["path"]).split("/")
                if not any(name.startswith(".") or not name for name in names):
                    yield _from_meta(meta)


def _from_meta(meta: Any) -> _Object:
    tag = (meta["e_tag"] or "").strip('"')
    return _Object(str(meta["path"]), int(meta["size"]), tag or str(int(meta["last_modified"].timestamp())))


def _root(path: Path) -> str:
    """Bucket or server of an address, such as `s3://bucket`."""
    scheme, _, rest = address_of(path).partition("://")
    host, _, key = rest.partition("/")
    if not host or "@" in host or ".." in key.split("/") or (scheme.startswith("http") and re.search("[?#]", key)):
        wanted = "expected s3://BUCKET/KEY, gs://BUCKET/KEY or https://SERVER/PATH, without a password or a query"
        raise InputError(f"{scheme}://{host.rpartition('@')[2]}: this address cannot be read; {wanted}")
    return f"{scheme}://{host}"


def _key(path: Path) -> str:
    root = _root(path)
    key = address_of(path)[len(root) + 1 :]
    return unquote(key) if root.startswith("http") else key


def _store(path: Path) -> Any:
    used = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "GOOGLE_"))}
    return _connect(_root(path), _setting("ITS2CLR_FAR_SECONDS", 30), tuple(sorted(used.items())))


@lru_cache(maxsize=16)
def _connect(root: str, seconds: float, _: tuple[tuple[str, str], ...]) -> Any:
    """A connection, which serves as long as the environment that describes it stays the same."""
    _obstore()
    from obstore.store import from_url

    return from_url(
        root,
        client_options={
            "connect_timeout": timedelta(seconds=min(_CONNECT_SECONDS, seconds)),
            "read_timeout": timedelta(seconds=seconds),
            "timeout": timedelta(days=30),  # of a whole object, however large
            "allow_http": True,
        },
        retry_config={"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=seconds * (_RETRIES + 1))},
    )


def _obstore() -> Any:
    with extra_needed("reading from an address", "remote"):
        import obstore

    return obstore


@contextmanager
def _said(address: str) -> Iterator[None]:
    """Errors of the library in one line: which address, what is wrong, what to do."""
    try:
        yield
    except Exception as error:
        kind, words = type(error).__name__, str(error)
        if isinstance(error, FileNotFoundError) and "NoSuchBucket" not in words:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", address) from error
        if not (isinstance(error, FileNotFoundError) or type(error).__module__.startswith("obstore")):
            raise
        advice = _CREDENTIALS.get(address.partition(":")[0], "")
        if "NoSuchBucket" in words:
            said = f"there is no bucket {address.split('/')[2]}"
        elif _NO_CREDENTIALS.search(words):
            said = f"there are no credentials; {advice}"
        elif kind in {"PermissionDeniedError", "UnauthenticatedError"}:
            said = "the server denies access" + (f"; check the credentials ({advice})" if advice else "")
        elif re.search("TimedOut|timed out|Timeout", words):
            said = (
                f"the server stopped answering for {_setting('ITS2CLR_FAR_SECONDS', 30):g} s; the same command goes "
                "on where it stopped (ITS2CLR_FAR_SECONDS is how long to wait)"
            )
        else:
            said = f"cannot be read ({' '.join(words.partition('Debug source:')[0].split())[:300]})"
        raise InputError(f"{address}: {said}") from error

"""What a cohort is: hashes of its tiles, labels and settings, by which every result knows what it was made from.

`content.json` in the cohort folder keeps the hashes of every tile file, with size, time and inode of the file. A file
whose stamp is still the same is not read again; any other is, so a copied cohort stays what it was. In a folder that
cannot be written, the hashes are kept in the user's cache. `its2clr doctor` reads every file.
"""

import hashlib
import json
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from its2clr.cohort.layout import tile_path
from its2clr.cohort.parallel import Progress, map_in_threads
from its2clr.cohort.tiles import Content, read_content, written_content
from its2clr.errors import InputError
from its2clr.files import read_json, stamp, user_cache, write_json
from its2clr.wording import shortened

CONTENT_FILE = "content.json"
_SETTLED_NS = 2 * 10**9
"""A file that changed less than this ago may change again within a tick of the clock: next time it is hashed again."""
_SAVE_EVERY_SECONDS = 30.0
_NAMED = 5

_Entries = dict[str, list[Any]]


def bag_contents(
    folder: Path,
    bag_ids: Sequence[str],
    *,
    just_written: Collection[str] = (),
    workers: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Content]:
    """The hashes of what the tile files of some bags hold.

    Args:
        folder: The cohort folder.
        bag_ids: The bags.
        just_written: Bags whose files say themselves what was written to them a moment ago.
        workers: Threads; the processors at hand if None.
        progress: Called with the files that are read and all that have to be.

    Raises:
        InputError: If a tile file is missing or damaged.
    """
    kept = [_read(path) for path in _places(folder)]
    found: dict[str, Content] = {}
    stamps: dict[str, list[int]] = {}
    for bag_id in bag_ids:
        path = tile_path(folder, bag_id)
        try:
            stamps[bag_id] = stamp(path)
        except OSError as error:
            raise InputError(f"{path}: the tile file of bag {bag_id!r} is missing; make the cohort again") from error
        for entry in (entries[bag_id] for entries in kept if bag_id in entries):
            if entry[:3] == stamps[bag_id]:
                found[bag_id] = Content(*entry[3:])
    waiting = [bag_id for bag_id in bag_ids if bag_id not in found]

    def read(bag_id: str) -> Content:
        path = tile_path(folder, bag_id)
        return (written_content(path) if bag_id in just_written else None) or read_content(path)

    new: _Entries = {}
    saved = time.monotonic()
    for number, (bag_id, content) in enumerate(
        zip(waiting, map_in_threads(read, waiting, workers), strict=True), start=1
    ):
        found[bag_id] = content
        if bag_id in just_written or time.time_ns() - stamps[bag_id][1] > _SETTLED_NS:
            new[bag_id] = [*stamps[bag_id], *content]
        if progress is not None:
            progress(number, len(waiting))
        if time.monotonic() - saved > _SAVE_EVERY_SECONDS:
            _save(folder, new)
            saved = time.monotonic()
    _save(folder, new)
    return {bag_id: found[bag_id] for bag_id in bag_ids}


def recorded_contents(folder: Path) -> dict[str, list[list[Any]]]:
    """What is kept about the tile files of a cohort, by bag: size, time, inode and hashes; older ones may be wrong."""
    known: dict[str, list[list[Any]]] = {}
    for path in _places(folder):
        for bag_id, entry in _read(path).items():
            known.setdefault(bag_id, []).append(entry)
    return known


def _places(folder: Path) -> tuple[Path, Path]:
    """Where the hashes are kept: in the cohort, or where that cannot be written, in the cache of the user."""
    name = hashlib.sha256(str(folder.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    return folder / CONTENT_FILE, user_cache() / f"content-{name}.json"


def _read(path: Path) -> _Entries:
    """A damaged file is as good as none: everything is hashed again."""
    try:
        return _parsed(path, tuple(stamp(path)))
    except OSError:
        return {}


@lru_cache(maxsize=4)
def _parsed(path: Path, _: tuple[int, ...]) -> _Entries:
    """What a file holds, not to be changed; it is read again when its stamp is another."""
    try:
        bags = read_json(path)["bags"]
        return {bag_id: entry for bag_id, entry in bags.items() if len(entry) == 3 + len(Content._fields)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _save(folder: Path, new: _Entries) -> None:
    if not new:
        return
    for path in _places(folder):
        with suppress(OSError):
            write_json(path, {"bags": {**_read(path), **new}})
            return


class BagIdentity(NamedTuple):
    """What a bag is.

    Attributes:
        bag_id: Its name.
        split: Its split.
        group: Its group.
        tiles: Hash of its tiles.
        labels: Hash of its label and those of its instances; empty where labels are out of reach.
    """

    bag_id: str
    split: str
    group: str
    tiles: str
    labels: str


class Change(NamedTuple):
    """One thing that is not as it was.

    Attributes:
        what: What changed: `tiles`, `labels`, `split`, `group`, `new`, `gone`, `order`, or a setting of `cohort.json`.
        bag_id: The bag; empty if it is the whole cohort.
        split: Its split.
    """

    what: str
    bag_id: str = ""
    split: str = ""


@dataclass(frozen=True, eq=False)
class Identity:
    """What a cohort is, all of it: two cohorts with the same identity give the same results.

    Attributes:
        info: What `cohort.json` says, without the version that wrote it.
        bags: Every bag, in order.
    """

    info: dict[str, Any]
    bags: tuple[BagIdentity, ...]

    @cached_property
    def digest(self) -> str:
        """One hash over all of it."""
        return hash_of(self.info, self.bags)

    @property
    def tiles(self) -> str:
        """One hash over the tiles of all bags, in order, whatever the bags are called and labelled."""
        return hash_of([bag.tiles for bag in self.bags])

    def without_test(self) -> "Identity":
        """The same without the test bags."""
        return Identity(self.info, tuple(bag for bag in self.bags if bag.split != "test"))

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return {"digest": self.digest, "info": self.info, "bags": [list(bag) for bag in self.bags]}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> "Identity":
        """From a JSON file."""
        return cls(document["info"], tuple(BagIdentity(*bag) for bag in document["bags"]))

    def changes_since(self, before: "Identity") -> list[Change]:
        """What is not as it was before."""
        settings = [
            Change(f"{name} of cohort.json")
            for name in dict.fromkeys([*before.info, *self.info])
            if hash_of(before.info.get(name)) != hash_of(self.info.get(name))
        ]
        old, new = ({bag.bag_id: bag for bag in one.bags} for one in (before, self))
        changes = [Change("gone", bag.bag_id, bag.split) for bag in before.bags if bag.bag_id not in new]
        for bag in self.bags:
            if bag.bag_id not in old:
                changes.append(Change("new", bag.bag_id, bag.split))
                continue
            was = old[bag.bag_id]
            fields = [name for name in BagIdentity._fields if getattr(was, name) != getattr(bag, name)]
            changes += [Change(name, bag.bag_id, bag.split) for name in fields]
        if not changes and list(old) != list(new):
            changes.append(Change("order"))
        return settings + changes


def identify(
    folder: Path,
    info: dict[str, Any],
    bags: Sequence[tuple[str, str, str]],
    labels: Sequence[int] | None,
    progress: Progress | None = None,
) -> Identity:
    """The identity of bags of a cohort; see `Cohort.identity`.

    Args:
        folder: The cohort folder.
        info: What `cohort.json` says, without the version that wrote it.
        bags: Name, split and group of each bag.
        labels: The label of each bag; None if labels are out of reach, then those of instances do not count either.
        progress: Called with the tile files that are read and all that have to be.
    """
    contents = bag_contents(folder, [bag[0] for bag in bags], progress=progress)
    of_bags = [""] * len(bags)
    if labels is not None:
        of_bags = [hash_of(label, contents[bag[0]].labels) for bag, label in zip(bags, labels, strict=True)]
    found = (BagIdentity(*bag, contents[bag[0]].tiles, label) for bag, label in zip(bags, of_bags, strict=True))
    return Identity(json.loads(json.dumps(info)), tuple(found))


def hash_of(*values: Any) -> str:
    """A hash of values that are fit for JSON."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]


def only_test_labels(changes: Sequence[Change]) -> bool:
    """Whether nothing changed but labels of test bags, which no training has seen."""
    return all(change.what == "labels" and change.split == "test" for change in changes)


def said_changes(changes: Sequence[Change]) -> list[str]:
    """Changes in words, one line for each kind, with the bags."""
    words = {
        "tiles": "other tiles",
        "labels": "other labels, of the bag or of its instances",
        "split": "another split",
        "group": "another group",
        "new": "new",
        "gone": "not there any more",
    }
    lines = []
    for what in dict.fromkeys(change.what for change in changes):
        bags = [change.bag_id for change in changes if change.what == what]
        if what in words:
            count = "bag" if len(bags) == 1 else f"{len(bags)} bags:"
            lines.append(f"{words[what]}: {count} {shortened(bags, _NAMED)}")
        else:
            lines.append("bags.csv lists the bags in another order" if what == "order" else f"another {what}")
    return lines

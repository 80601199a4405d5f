"""Make a cohort folder, whatever its bags are made of: claim it, keep what is whole, pack the rest, close it.

`pack_cohort` is the one way to a cohort. What is particular to images, slides, features and drawn slides is given to
it: how to tell that a bag is finished, how to pack one, and who does the work. `bags.csv` is written last, so a folder
that has it is complete; it is removed when a tile file is about to change. The same call again goes on where it
stopped.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import pandas as pd

from its2clr import far
from its2clr.cohort.identity import bag_contents, recorded_contents
from its2clr.cohort.layout import (
    BAGS_FILE,
    PROBLEMS_FILE,
    CohortInfo,
    LeftOut,
    claim_folder,
    mark_failed,
    tile_path,
    write_bags,
    write_problems,
)
from its2clr.cohort.manifest import BagTable
from its2clr.cohort.parallel import Progress, map_in_threads
from its2clr.cohort.splits import FEWEST_BAGS, assign_splits
from its2clr.cohort.tables import Problem, check_classes, raise_problems
from its2clr.cohort.tiles import Content, TileFile, read_content, read_tiles, written_content
from its2clr.errors import InputError
from its2clr.files import remove_half_written, stamp
from its2clr.wording import shortened_lines

TOO_FEW = (
    f"fewer than {FEWEST_BAGS} bags can be looked at, not trained with: train, val and test each need bags of both "
    "classes; add bags to the manifest and run the command again"
)
_REASONS = 5
_PARTICULAR = re.compile(r"'[^']*'|\S*[/\\]\S*|\d[\d.]*")
"""What differs between problems of one kind: names, paths and numbers."""

FINGERPRINT = "fingerprint"
"""The attribute of a tile file that changes with everything the file was made from."""


class NoBagLeftError(InputError):
    """Not one bag to be predicted could be packed; `problems.csv` of the cohort says why."""


@dataclass(frozen=True)
class BagResult:
    """What became of one bag.

    Attributes:
        n_instances: Its instances in the cohort; 0 if the bag was left out.
        left_out: Instances that are not in the cohort, or the bag as a whole, and why.
        notes: What a person should know of a bag that is in the cohort.
    """

    n_instances: int = 0
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PackSummary:
    """What packing did.

    Attributes:
        path: The cohort folder.
        n_bags: Bags in the cohort.
        n_instances: Instances in the cohort.
        n_packed: Bags written by this run.
        n_skipped: Bags that were already there, whole.
        left_out: What is not in the cohort, and why; the rows of `problems.csv`.
        remark: What a person should know about the cohort as a whole; may be empty.
    """

    path: Path
    n_bags: int
    n_instances: int
    n_packed: int
    n_skipped: int
    left_out: tuple[LeftOut, ...]
    remark: str = field(default="", kw_only=True)

    def remarks(self) -> list[str]:
        """The most frequent reasons why something was left out, and what there is to know of the whole, in lines."""
        return [*frequent_reasons(self.left_out), *([f"note: {self.remark}"] if self.remark else [])]


def frequent_reasons(left_out: Sequence[LeftOut], most: int = _REASONS) -> list[str]:
    """Why things were left out, the most frequent reasons first, in lines; names and numbers may differ."""
    alike: dict[str, list[LeftOut]] = {}
    for one in left_out:
        alike.setdefault(_PARTICULAR.sub("~", one.problem), []).append(one)
    groups = sorted(alike.values(), key=len, reverse=True)
    lines = [f"  {len(group)} x {group[0].problem} (such as {group[0].bag_id or group[0].file})" for group in groups]
    return shortened_lines(lines, most, "more reasons")


_Item = TypeVar("_Item")
_Result = TypeVar("_Result", bound=BagResult)

Spread = Callable[[Callable[[_Item], _Result], Mapping[str, _Item]], Iterable[tuple[str, _Result]]]
"""Applies a function to items, wherever the work is done, and yields name and result of each as it is done."""


class Packed(NamedTuple, Generic[_Result]):
    """A finished cohort: what packing did, and what became of each item."""

    summary: PackSummary
    results: dict[str, _Result]


@dataclass(frozen=True, eq=False)
class SplitPlan:
    """Where the splits of a manifest's bags come from: checked before packing, settled when it is known what is left.

    Attributes:
        manifest: The bags.
        fractions: Shares of train, val and test, if the manifest has no splits.
        seed: Chooses the splits, if the manifest has none.
    """

    manifest: BagTable
    fractions: Sequence[float]
    seed: int

    def settings(self) -> dict[str, Any]:
        """The plan as settings of the cohort.

        Raises:
            InputError: If the bags cannot be divided so; said before hours of packing, not after.
        """
        if not self.manifest.labelled:
            return {"splits": "all test"}
        if self.manifest.has_splits:
            return {"splits": "manifest"}
        if not self.manifest.too_few:
            self._assign(self.manifest.bags)
        return {"splits": "assigned", "seed": self.seed, "fractions": list(self.fractions)}

    def settle(self, kept: pd.DataFrame, out: Path) -> pd.DataFrame:
        """Give the bags that were packed their splits.

        Args:
            kept: The rows of the manifest's bags that were packed.
            out: The cohort folder, for messages.

        Raises:
            NoBagLeftError: If no bag is left of those to be predicted, or of fewer than can be divided.
            InputError: If no bag is left, or a split lacks a class because bags were left out.
        """
        if self.manifest.too_few and not kept.empty:
            return kept if self.manifest.has_splits else kept.assign(split="train")
        lost = len(self.manifest.bags) - len(kept)
        after = f"after leaving out {lost} bags that cannot be used (see {out / PROBLEMS_FILE})"
        if kept.empty:
            raise NoBagLeftError(str(Problem(f"{out}, {after}", "no bag is left")))
        if not self.manifest.has_splits:
            try:
                return kept.assign(split=self._assign(kept))
            except InputError as error:
                raise InputError(f"{out}: {after}, {error}") from error
        where = f"{out}, {after}"
        if self.manifest.labelled:
            problems: list[Problem] = []
            check_classes(kept["label"].tolist(), kept["split"].tolist(), where, problems)
            raise_problems(problems)
        return kept

    def _assign(self, bags: pd.DataFrame) -> list[str]:
        splits: list[str] = assign_splits(
            bags["label"].tolist(), bags["group"].tolist(), self.fractions, self.seed
        ).tolist()
        return splits


def pack_cohort(
    out: Path,
    info: CohortInfo,
    bags: pd.DataFrame,
    items: Mapping[str, _Item],
    *,
    finished: Callable[[_Item], _Result | None],
    pack: Callable[[_Item], _Result],
    spread: Spread[_Item, _Result] | None = None,
    workers: int | None = None,
    splits: SplitPlan | None = None,
    left_out: Sequence[LeftOut] = (),
    progress: Progress | None = None,
) -> Packed[_Result]:
    """Make a cohort folder of bags, or go on with one.

    Args:
        out: The cohort folder; new, empty, or begun with the same settings.
        info: What it is to hold, and the settings it is made with.
        bags: The table of bags. Where it has a column `n_instances`, all bags are sure to be packed; otherwise the
            results say how many instances each bag has, and those without any are left out.
        items: What there is to pack, by bag.
        finished: What is there of an item, if it is whole and was made from the same things; None if not.
        pack: Packs one item. It writes to `path_to_write`.
        spread: Who does that, for items that are not finished; threads of this process if None.
        workers: Threads; the processors at hand if None.
        splits: How bags get their splits; None if the table says it.
        left_out: What was left out before, such as bags without a file.
        progress: Called with the items done and all items.

    Raises:
        InputError: If the folder holds something else, no bag is left, or a split lacks a class because bags were
            left out.
    """
    claim_folder(out, info)
    remove_half_written(out)
    before = _remove_edited(out, bags["bag_id"].tolist(), workers)
    found: dict[str, _Result] = {}
    waiting: dict[str, _Item] = {}
    for (name, item), there in zip(items.items(), map_in_threads(finished, items.values(), workers), strict=True):
        if there is None:
            waiting[name] = item
        else:
            found[name] = there
    n_skipped = len(found)
    if progress is not None and found:
        progress(n_skipped, len(items))
    for done, (name, result) in enumerate(_spread(spread, pack, waiting, workers), start=n_skipped + 1):
        found[name] = result
        if progress is not None:
            progress(done, len(items))
    results = {name: found[name] for name in items}
    problems = _in_order_of_rows([*left_out, *(one for result in results.values() for one in result.left_out)], bags)
    write_problems(out, problems)
    kept = bags if "n_instances" in bags.columns else _packed_bags(out, bags, results)
    try:
        kept = kept if splits is None else splits.settle(kept, out)
    except InputError as error:
        mark_failed(out)
        raise type(error)("\n".join([str(error), *frequent_reasons(problems)])) from error
    write_bags(out, kept)
    names = [bag_id for bag_id in kept["bag_id"].tolist() if tile_path(out, bag_id).exists()]
    bag_contents(out, names, just_written={*waiting, *names} - (before - waiting.keys()), workers=workers)
    total = int(kept["n_instances"].sum())
    packed = sum(result.n_instances > 0 for result in results.values()) - n_skipped
    remark = TOO_FEW if splits is not None and splits.manifest.too_few else ""
    return Packed(PackSummary(out, len(kept), total, packed, n_skipped, tuple(problems), remark=remark), results)


def _spread(
    spread: Spread[_Item, _Result] | None,
    pack: Callable[[_Item], _Result],
    waiting: Mapping[str, _Item],
    workers: int | None,
) -> Iterable[tuple[str, _Result]]:
    if not waiting:
        return ()
    if spread is not None:
        return spread(pack, waiting)
    return zip(waiting, map_in_threads(pack, waiting.values(), workers), strict=True)


def _in_order_of_rows(left_out: list[LeftOut], bags: pd.DataFrame) -> list[LeftOut]:
    """What was left out, in the order of the table; the row of an image may be that of another table."""
    row_of = dict(zip(bags["bag_id"].tolist(), bags.index.tolist(), strict=True))
    return sorted(left_out, key=lambda one: row_of.get(one.bag_id, one.row))


def _packed_bags(out: Path, bags: pd.DataFrame, results: Mapping[str, BagResult]) -> pd.DataFrame:
    """The bags that have instances; of others nothing stays in the folder."""
    names = bags["bag_id"].tolist()
    table = bags.assign(n_instances=[results[name].n_instances if name in results else 0 for name in names])
    for bag_id in table.loc[table["n_instances"] == 0, "bag_id"].tolist():
        if tile_path(out, bag_id).exists():
            path_to_write(out, bag_id).unlink()
    return table[table["n_instances"] > 0]


def path_to_write(out: Path, bag_id: str) -> Path:
    """The tile file of a bag that is about to change: from now on the folder does not look complete."""
    (out / BAGS_FILE).unlink(missing_ok=True)
    return tile_path(out, bag_id)


def _remove_edited(out: Path, bag_ids: Iterable[str], workers: int | None) -> set[str]:
    """Remove tile files that were edited since they were packed, so that they are packed again.

    Returns:
        The bags that an earlier packing has finished.
    """
    known = recorded_contents(out)

    def edited(bag_id: str) -> bool:
        path = tile_path(out, bag_id)
        written, place = written_content(path), stamp(path)
        kept = [Content(*entry[3:]) for entry in known[bag_id] if entry[:3] == place]
        try:
            return written is not None and (kept or [read_content(path)])[0] != written
        except InputError:  # damaged, which who packs it will notice
            return False

    there = [bag_id for bag_id in bag_ids if bag_id in known and tile_path(out, bag_id).exists()]
    for bag_id, is_edited in zip(there, map_in_threads(edited, there, workers), strict=True):
        if is_edited:
            path_to_write(out, bag_id).unlink()
    return set(known)


def whole_tile_file(out: Path, bag_id: str, fingerprint: str) -> TileFile | None:
    """The tile file of a bag if it is there, whole, and has this fingerprint."""
    path = tile_path(out, bag_id)
    if not path.exists():
        return None
    try:
        tiles = read_tiles(path)
    except InputError:
        return None
    return tiles if tiles.attributes.get(FINGERPRINT) == fingerprint else None


def fingerprint(*content: object) -> str:
    """A hash of what a bag is made from: settings, names, the stamps of files; all of it must be fit for JSON."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def file_stamp(path: Path) -> tuple[int, int | str]:
    """Size and time of change of a file, or the version of an object far away; (-1, -1) if there is none."""
    try:
        if far.is_far(path):
            return far.stamp(path)
        status = path.stat()
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns

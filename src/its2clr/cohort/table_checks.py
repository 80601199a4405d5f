"""The rules every table of bags must keep: identifiers, labels, groups, splits and classes."""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import pandas as pd

from its2clr.cohort.splits import SPLITS
from its2clr.cohort.tables import Problem, at_row, column_cells

UNKNOWN_LABEL = -1
_LONGEST_FILE_NAME = 200
_BAG_LABELS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}
_INSTANCE_LABELS = {**_BAG_LABELS, "": UNKNOWN_LABEL, "-1": UNKNOWN_LABEL, "-1.0": UNKNOWN_LABEL}
_SPLIT_NAMES = {**{name: name for name in SPLITS}, "validation": "val", "valid": "val"}


def check_bag_ids(table: pd.DataFrame, path: Path, problems: list[Problem]) -> None:
    """Note bag identifiers that are empty, used twice, or too long to name a file."""
    first: dict[str, int] = {}
    for row, bag_id in column_cells(table, "bag_id"):
        where = at_row(path, row)
        if not bag_id:
            problems.append(Problem(where, "bag_id is empty"))
        elif bag_id in first:
            problems.append(Problem(where, f"bag_id {bag_id!r} was already used in row {first[bag_id]}"))
        elif len(quote(bag_id, safe="")) > _LONGEST_FILE_NAME:
            problems.append(Problem(where, f"bag_id {bag_id[:30]!r}... is too long to name a file"))
        first.setdefault(bag_id, row)


def parse_bag_labels(table: pd.DataFrame, path: Path, problems: list[Problem]) -> list[int]:
    """Read the label column of bags; a cell that is not 0 or 1 is noted and read as unknown."""
    labels = []
    for row, cell in column_cells(table, "label"):
        if cell not in _BAG_LABELS:
            problems.append(Problem(at_row(path, row), f"label is {cell!r}, expected 0 or 1"))
        labels.append(_BAG_LABELS.get(cell, UNKNOWN_LABEL))
    return labels


def parse_instance_labels(table: pd.DataFrame, path: Path, problems: list[Problem]) -> list[int]:
    """Read the label column of instances; empty and -1 mean unknown."""
    labels = []
    for row, cell in column_cells(table, "label"):
        if cell not in _INSTANCE_LABELS:
            message = f"label is {cell!r}, expected 0 or 1 (empty or -1 if unknown)"
            problems.append(Problem(at_row(path, row), message))
        labels.append(_INSTANCE_LABELS.get(cell, UNKNOWN_LABEL))
    return labels


def parse_groups(table: pd.DataFrame, path: Path, problems: list[Problem]) -> list[str]:
    """Read which bags belong together; without a (filled) column `group` each bag stands alone."""
    bag_ids = [str(bag_id) for bag_id in table["bag_id"]]
    if "group" not in table.columns:
        return bag_ids
    cells = column_cells(table, "group")
    if not any(group for _, group in cells):
        return bag_ids
    for row, group in cells:
        if not group:
            message = "group is empty while other rows have one; fill it, or leave out the whole column"
            problems.append(Problem(at_row(path, row), message))
    return [group for _, group in cells]


def parse_splits(table: pd.DataFrame, path: Path, problems: list[Problem]) -> list[str] | None:
    """Read the split column as train, val or test (`validation` and `valid` mean val).

    Returns:
        One split per bag, "" where the cell is wrong; None if no bag has a split.
    """
    if "split" not in table.columns:
        return None
    cells = column_cells(table, "split")
    if not any(split for _, split in cells):
        return None
    splits = []
    for row, cell in cells:
        split = _SPLIT_NAMES.get(cell.lower(), "")
        if not cell:
            message = "split is empty while other rows have one; fill it, or leave out the whole column"
            problems.append(Problem(at_row(path, row), message))
        elif not split:
            problems.append(Problem(at_row(path, row), f"split is {cell!r}, expected train, val or test"))
        splits.append(split)
    return splits


def check_groups_in_one_split(
    rows: Sequence[int], groups: Sequence[str], splits: Sequence[str], path: Path, problems: list[Problem]
) -> None:
    """Note each bag whose group already has bags in another split."""
    first: dict[str, tuple[str, int]] = {}
    for row, group, split in zip(rows, groups, splits, strict=True):
        other, other_row = first.setdefault(group, (split, row))
        if split and other and split != other:
            message = f"group {group!r} is in split {split!r} here and in {other!r} in row {other_row}"
            problems.append(Problem(at_row(path, row), message))


def check_classes(labels: Sequence[int], splits: Sequence[str], where: str, problems: list[Problem]) -> None:
    """Note each split that has no bags, or bags of one class only."""
    for name in SPLITS:
        classes = {label for label, split in zip(labels, splits, strict=True) if split == name}
        if not classes:
            only_new = " (--unlabelled packs bags that are only to be predicted)" if set(splits) == {"test"} else ""
            message = f"no bag is in split {name!r}; train, val and test each need bags of both classes{only_new}"
            problems.append(Problem(where, message))
            continue
        problems += [
            Problem(where, f"split {name!r} has no bag with label {label}; each split needs both classes")
            for label in (0, 1)
            if label not in classes
        ]

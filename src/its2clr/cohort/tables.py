"""Tables that people write: read as text, their columns checked, and every problem collected with its row.

Rows are numbered as a spreadsheet shows them: the header is row 1.
"""

import csv
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pandas as pd

from its2clr import far
from its2clr.cohort.splits import SPLITS
from its2clr.errors import InputError
from its2clr.wording import did_you_mean, shortened, shortened_lines

TABLES = (".csv", ".tsv", ".txt")
"""Endings of files that are tables."""
UNKNOWN_LABEL = -1
"""Label of an instance whose ground truth is not known."""

_OTHER_NAMES = {"group": ("patient", "patient_id", "case_id", "case"), "bag_id": ("slide_id",)}
"""What a column is called in other programs; the first that is there is taken."""
_KNOWN_COLUMNS = {
    *("bag_id", "path", "label", "split", "group", "file", "mpp", "annotation", "n_instances"),
    *(name for others in _OTHER_NAMES.values() for name in others),
}
_DELIMITERS = (",", ";", "\t")
_LONGEST_FILE_NAME = 200
_BAG_LABELS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}
_INSTANCE_LABELS = {**_BAG_LABELS, "": UNKNOWN_LABEL, "-1": UNKNOWN_LABEL, "-1.0": UNKNOWN_LABEL}
_SPLIT_NAMES = {**{name: name for name in SPLITS}, "validation": "val", "valid": "val"}


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in an input file.

    Attributes:
        where: The file, with the row when there is one.
        message: What is wrong and what was expected.
    """

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


def at_row(path: Path, row: int) -> str:
    """The name of a place in a table."""
    return f"{path}, row {row}"


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise one error that lists the first problems and counts the others; do nothing if there are none.

    Raises:
        InputError: If there is any problem.
    """
    if len(problems) == 1:
        raise InputError(str(problems[0]))
    if problems:
        raise InputError("\n  ".join([f"{len(problems)} problems:", *shortened_lines([str(one) for one in problems])]))


def read_table(path: Path, problems: list[Problem]) -> pd.DataFrame | None:
    """Read a table with every cell as text, stripped of surrounding blanks.

    Nothing is guessed: `007`, `NA` and `1e5` stay what they are. Empty lines are skipped. Commas, semicolons and
    tabs are accepted as separators, whichever the header uses most. Columns with a meaning are known in any case of
    letters. Where there is no `group`, a column `patient`, `patient_id`, `case_id` or `case` serves as it, and where
    there is no `bag_id`, CLAM's `slide_id`.

    Args:
        path: The file, UTF-8 with or without byte order mark.
        problems: Receives what is wrong with the file.

    Returns:
        The cells, indexed by row; None if the file cannot be used at all.
    """
    try:
        with far.local(path) as file:
            text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        problems.append(Problem(str(path), "is not UTF-8 text; save it as 'CSV UTF-8'"))
        return None
    except OSError as error:
        reason = "does not exist" if not path.exists() else f"cannot be read ({error.strerror})"
        problems.append(Problem(str(path), reason))
        return None
    header_line = text.split("\n", 1)[0]
    delimiter = max(_DELIMITERS, key=header_line.count)
    try:
        if "\0" in text:
            raise csv.Error(f"a NUL character in row {text[: text.index(chr(0))].count(chr(10)) + 1}")  # noqa: TRY301
        records = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
    except csv.Error as error:
        problems.append(Problem(str(path), f"cannot be read as a table ({error})"))
        return None
    columns = [_column_name(cell.strip()) for cell in records[0]] if records else []
    if not any(columns):
        problems.append(Problem(at_row(path, 1), "the first row must name the columns, but it is empty"))
        return None
    while not columns[-1]:
        columns.pop()
    repeated = sorted({name for name in columns if columns.count(name) > 1})
    if repeated:
        message = "column without a name" if repeated == [""] else f"column {repeated[-1]!r} appears twice"
        problems.append(Problem(at_row(path, 1), message))
        return None
    return _to_frame(path, _with_usual_names(columns), records[1:], problems)


def _with_usual_names(columns: list[str]) -> list[str]:
    for name, others in _OTHER_NAMES.items():
        there = [other for other in others if other in columns]
        if name not in columns and there:
            columns = [name if column == there[0] else column for column in columns]
    return columns


def read_columns(path: Path, names: Iterable[str], advice: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Read a table that must have these columns; see `read_table` and `require_columns`.

    Raises:
        InputError: It cannot be read, or a column is missing.
    """
    problems: list[Problem] = []
    table = read_table(path, problems)
    if table is not None:
        require_columns(table, path, names, problems, advice)
    raise_problems(problems)
    assert table is not None
    return table


def _column_name(written: str) -> str:
    """`Group` and `SPLIT` mean what `group` and `split` do; a column passed over for its case would leak patients."""
    return written.lower() if written.lower() in _KNOWN_COLUMNS else written


def _to_frame(path: Path, columns: list[str], records: list[list[str]], problems: list[Problem]) -> pd.DataFrame:
    rows: list[int] = []
    cells: list[list[str]] = []
    for row, record in enumerate(records, start=2):
        values = [cell.strip() for cell in record]
        if not any(values):
            continue
        if any(values[len(columns) :]):
            message = f"{len(values)} values under {len(columns)} columns; quote values that hold separators"
            problems.append(Problem(at_row(path, row), message))
        values += [""] * (len(columns) - len(values))
        rows.append(row)
        cells.append(values[: len(columns)])
    by_column = {name: [values[i] for values in cells] for i, name in enumerate(columns)}
    return pd.DataFrame(by_column, index=pd.Index(rows, dtype="int64", name="row"), dtype=object)


def column_cells(table: pd.DataFrame, column: str) -> list[tuple[int, str]]:
    """The cells of a column, each with its row."""
    return list(zip(table.index.tolist(), table[column].tolist(), strict=True))


def require_columns(
    table: pd.DataFrame,
    path: Path,
    names: Iterable[str],
    problems: list[Problem],
    advice: Mapping[str, str] | None = None,
) -> bool:
    """Note each required column that is missing, with the columns found and the closest of them.

    Args:
        table: The table.
        path: Its file.
        names: The columns it must have.
        problems: Receives the missing ones.
        advice: What to do when a column is missing, by column.

    Returns:
        Whether all columns are there.
    """
    found = [str(name) for name in table.columns]
    missing = [name for name in names if name not in found]
    for name in missing:
        remedy = f"; {advice[name]}" if advice and name in advice else ""
        message = f"column {name!r} is missing{did_you_mean(name, found)} (columns: {', '.join(found)}){remedy}"
        problems.append(Problem(at_row(path, 1), message))
    return not missing


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


def parse_bag_labels(
    table: pd.DataFrame, path: Path, problems: list[Problem], positive: Collection[str] = ()
) -> list[int]:
    """Read the label column of bags; a cell that cannot be a label is noted and read as unknown.

    Args:
        table: The table.
        path: Its file.
        problems: Receives what is wrong.
        positive: Labels in words that mean 1, in any case; all others then mean 0. None: labels are 0 and 1.
    """
    if not positive:
        in_words = not set(table["label"]) & _BAG_LABELS.keys()
        expected = "0 or 1" + ("; of labels in words, name those that mean 1 with --positive" if in_words else "")
        return _parse_labels(table, path, problems, _BAG_LABELS, expected)
    words = sorted(set(table["label"]) - {""})
    wanted = {word.casefold() for word in positive}
    for word in positive:
        if word.casefold() not in {cell.casefold() for cell in words}:
            listed = f" (labels: {shortened(words)})"
            problems.append(Problem(str(path), f"no label is {word!r}{did_you_mean(word, words)}{listed}"))
    known = {word: int(word.casefold() in wanted) for word in words}
    return _parse_labels(table, path, problems, known, f"one of {shortened(words)}")


def parse_instance_labels(table: pd.DataFrame, path: Path, problems: list[Problem]) -> list[int]:
    """Read the label column of instances; empty and -1 mean unknown."""
    return _parse_labels(table, path, problems, _INSTANCE_LABELS, "0 or 1 (empty or -1 if unknown)")


def _parse_labels(
    table: pd.DataFrame, path: Path, problems: list[Problem], known: Mapping[str, int], expected: str
) -> list[int]:
    cells = column_cells(table, "label")
    problems += [
        Problem(at_row(path, row), f"label is {cell!r}, expected {expected}")
        for row, cell in cells
        if cell not in known
    ]
    return [known.get(cell, UNKNOWN_LABEL) for _, cell in cells]


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


def check_classes(labels: Sequence[int], splits: Sequence[str] | None, where: str, problems: list[Problem]) -> None:
    """Note each split that has no bags, or bags of one class only; without splits, each class that has no bag."""
    if splits is None:
        needed = "bags of both classes are needed"
        problems += [Problem(where, f"no bag has label {label}; {needed}") for label in (0, 1) if label not in labels]
        return
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


def contradiction(label: int, labels: npt.NDArray[np.int8]) -> str | None:
    """How the labels of a bag's instances contradict that of the bag; None if they do not."""
    positives = int((labels == 1).sum())
    if label == 0 and positives:
        return f"is negative but {positives} of its instances are labelled positive"
    if label == 1 and (labels == 0).all():
        return "is positive but all its instances are labelled negative"
    return None

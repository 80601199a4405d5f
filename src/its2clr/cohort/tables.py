"""Read comma separated tables as text, with the row numbers a spreadsheet shows, and collect problems."""

import csv
import difflib
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from its2clr.errors import InputError

_LISTED = 10
KNOWN_COLUMNS = {"bag_id", "path", "label", "split", "group", "patient", "file", "mpp", "annotation", "n_instances"}
"""Columns with a meaning; their names are read in any case."""

_DELIMITERS = (",", ";", "\t")


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
    """Name a place in a table the way a spreadsheet does (the header is row 1)."""
    return f"{path}, row {row}"


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise one error that lists the first problems and counts the others; do nothing if there are none.

    Raises:
        InputError: If there is any problem.
    """
    if not problems:
        return
    if len(problems) == 1:
        raise InputError(str(problems[0]))
    lines = [f"{len(problems)} problems:"]
    lines += [f"  {problem}" for problem in problems[:_LISTED]]
    if len(problems) > _LISTED:
        lines.append(f"  and {len(problems) - _LISTED} more")
    raise InputError("\n".join(lines))


def _known_name(name: str) -> str:
    """`Group` and `SPLIT` mean what `group` and `split` do; a column passed over for its case would leak patients."""
    return name.lower() if name.lower() in KNOWN_COLUMNS else name


def read_table(path: Path, problems: list[Problem]) -> pd.DataFrame | None:
    """Read a table with every cell as text, stripped of surrounding blanks.

    Nothing is guessed: `007`, `NA` and `1e5` stay what they are. Empty lines are skipped. Commas,
    semicolons and tabs are accepted as separators, whichever the header uses most.

    Args:
        path: The file, UTF-8 with or without byte order mark.
        problems: Receives what is wrong with the file.

    Returns:
        The cells, indexed by spreadsheet row; None if the file cannot be used at all.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
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
        records = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
    except csv.Error as error:
        problems.append(Problem(str(path), f"cannot be read as a table ({error})"))
        return None
    columns = [_known_name(cell.strip()) for cell in records[0]] if records else []
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
    return _to_frame(path, columns, records[1:], problems)


def read_bag_table(path: Path) -> pd.DataFrame:
    """A table of bags as text, in which a column `patient` serves as `group` where there is none.

    Raises:
        InputError: It cannot be read as a table.
    """
    problems: list[Problem] = []
    table = read_table(path, problems)
    raise_problems(problems)
    assert table is not None
    if "group" not in table.columns and "patient" in table.columns:
        table = table.rename(columns={"patient": "group"})
    return table


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
    """List the cells of a column with their spreadsheet rows."""
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
        remedy = f" ({advice[name]})" if advice and name in advice else ""
        spelled = {column.lower(): column for column in found}
        close = difflib.get_close_matches(name.lower(), spelled, n=1, cutoff=0.6)
        hint = f"; did you mean {spelled[close[0]]!r}?" if close else ""
        message = f"column {name!r} is missing; the columns are: {', '.join(found)}{hint}{remedy}"
        problems.append(Problem(at_row(path, 1), message))
    return not missing

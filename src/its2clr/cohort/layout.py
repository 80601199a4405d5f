"""Where things lie in a cohort folder, and how its tables are read and written.

```
cohort.json          format, tile size, encoding, package version, settings, has_instance_labels, labelled,
                     kind (tiles or features), feature_dim
bags.csv             bag_id,label,split,group,n_instances ...; no label if the cohort is not labelled;
                     written last, so a folder that has it is complete
problems.csv         bag_id,file,row,problem: what was left out, and why
tiles/<bag_id>.h5    one tile file per bag; characters that file systems refuse are percent-encoded
```
"""

import csv
import io
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from its2clr.cohort.tables import (
    Problem,
    at_row,
    check_bag_ids,
    check_groups_in_one_split,
    column_cells,
    parse_bag_labels,
    parse_groups,
    parse_splits,
    read_table,
    require_columns,
)
from its2clr.errors import InputError
from its2clr.files import atomic_path, read_json, write_json
from its2clr.units import TilePixels
from its2clr.version import __version__
from its2clr.wording import shortened

FORMAT = 1
BAGS_FILE = "bags.csv"
INFO_FILE = "cohort.json"
_FAILED = ".failed"
PROBLEMS_FILE = "problems.csv"
TILES_FOLDER = "tiles"
BAG_COLUMNS = ("bag_id", "label", "split", "group")

Encoding = Literal["jpeg", "png"]
Kind = Literal["tiles", "features"]


class CohortInfo(BaseModel):
    """What `cohort.json` holds."""

    model_config = ConfigDict(frozen=True)

    format: int = Field(default=FORMAT, description="version of the cohort format")
    tile_size: TilePixels = Field(gt=0, description="pixels of the square tiles")
    encoding: Encoding | Literal["features"] = Field(description="how the tiles are encoded")
    kind: Kind = Field(default="tiles", description="whether the tiles themselves are there, or their features")
    feature_dim: int | None = Field(default=None, gt=0, description="number of features of a tile; null for tiles")
    its2clr_version: str = Field(default=__version__, description="package version that wrote the cohort")
    has_instance_labels: bool = Field(default=False, description="whether instance ground truth is known")
    labelled: bool = Field(default=True, description="whether the bags have labels")
    settings: dict[str, Any] = Field(default_factory=dict, description="the settings it was made with")


@dataclass(frozen=True)
class LeftOut:
    """An image or a bag that is not in the cohort, and why: one row of `problems.csv`.

    Attributes:
        bag_id: The bag.
        file: The image; empty when the whole bag was left out.
        row: The row of the manifest that names it.
        problem: Why it was left out.
    """

    bag_id: str
    file: str
    row: int
    problem: str


def tile_path(folder: Path, bag_id: str) -> Path:
    """The tile file of a bag."""
    return folder / TILES_FOLDER / f"{quote(bag_id, safe='')}.h5"


def read_info(folder: Path) -> CohortInfo:
    """Read `cohort.json`.

    Raises:
        InputError: If the folder is no cohort, or one of a newer format.
    """
    if not folder.exists():
        raise InputError(f"{folder}: does not exist; give the folder of a cohort")
    if not folder.is_dir():
        raise InputError(f"{folder}: is a file; give the folder of a cohort")
    path = folder / INFO_FILE
    if not path.exists():
        raise InputError(f"{folder}: is not a cohort (it has no {INFO_FILE}); make one from your images first")
    try:
        info = CohortInfo.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "content"
        raise InputError(f"{path}: {key}: {first['msg']}") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error
    if info.format > FORMAT:
        advice = f"this version reads up to {FORMAT}; update its2clr (it was made by {info.its2clr_version})"
        raise InputError(f"{path}: the cohort has format {info.format}, {advice}")
    return info


def write_info(folder: Path, info: CohortInfo) -> None:
    """Write `cohort.json` so that it appears whole."""
    write_json(folder / INFO_FILE, info.model_dump(mode="json"))


def read_bags(folder: Path, problems: list[Problem], *, labelled: bool = True) -> pd.DataFrame | None:
    """Read `bags.csv`, noting what is wrong with it.

    Args:
        folder: The cohort folder.
        problems: Receives what is wrong.
        labelled: Whether the bags have labels, as `cohort.json` says.

    Returns:
        The bags (identifiers, groups and additional columns as text, n_instances and, if labelled, label as
        int64); None if the table cannot be used.
    """
    path = folder / BAGS_FILE
    if not path.exists():
        message = f"{BAGS_FILE} is missing: the cohort is incomplete; run the command that makes it again"
        problems.append(Problem(str(folder), message))
        return None
    before = len(problems)
    table = read_table(path, problems)
    needed = [*_core_columns(labelled=labelled), "n_instances"]
    if table is None or not require_columns(table, path, needed, problems):
        return None
    if not labelled and "label" in table.columns:
        advice = "remove it, or pack the bags with their labels into another folder"
        problems.append(
            Problem(at_row(path, 1), f"column 'label' in a cohort that was packed without labels; {advice}")
        )
    if table.empty:
        problems.append(Problem(str(path), "there are no bags"))
    check_bag_ids(table, path, problems)
    labels = {"label": parse_bag_labels(table, path, problems)} if labelled else {}
    groups = parse_groups(table, path, problems)
    splits = parse_splits(table, path, problems)
    if splits is None:
        problems.append(Problem(at_row(path, 1), "column 'split' is empty"))
    else:
        check_groups_in_one_split(table.index.tolist(), groups, splits, path, problems)
    counts = []
    for row, cell in column_cells(table, "n_instances"):
        count = int(cell) if cell.isdecimal() else 0
        if count < 1:
            problems.append(Problem(at_row(path, row), f"n_instances is {cell!r}, expected a number above 0"))
        counts.append(count)
    if splits is None or len(problems) > before:
        return None
    bags = table.reset_index(drop=True).astype("str")
    core = {"bag_id": bags["bag_id"], **labels, "split": splits, "group": groups, "n_instances": counts}
    more = {str(name): bags[name] for name in bags.columns if name not in core}
    return pd.DataFrame({**core, **more}).astype(dict.fromkeys([*labels, "n_instances"], "int64"))


def _core_columns(*, labelled: bool) -> list[str]:
    return [name for name in BAG_COLUMNS if labelled or name != "label"]


def write_bags(folder: Path, bags: pd.DataFrame) -> None:
    """Write `bags.csv` so that it appears whole: the core columns first (label if there), `n_instances` last."""
    core = _core_columns(labelled="label" in bags.columns)
    more = [name for name in bags.columns if name not in {*core, "n_instances"}]
    text = bags[[*core, *more, "n_instances"]].to_csv(index=False, lineterminator="\n")
    _write_if_changed(folder / BAGS_FILE, text.encode("utf-8", "replace"))


def write_problems(folder: Path, left_out: Iterable[LeftOut]) -> None:
    """Write `problems.csv` so that it appears whole; with nothing left out it holds its header only."""
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(("bag_id", "file", "row", "problem"))
    writer.writerows(astuple(one) for one in left_out)
    _write_if_changed(folder / PROBLEMS_FILE, buffer.getvalue().encode("utf-8", "replace"))


def _write_if_changed(path: Path, content: bytes) -> None:
    """Write a file so that it appears whole; one that holds just this is not touched."""
    if path.is_file() and path.read_bytes() == content:
        return
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def mark_failed(out: Path) -> None:
    """Note that packing ended without a cohort: it may be tried again with other settings."""
    (out / _FAILED).touch()


def claim_folder(out: Path, info: CohortInfo) -> None:
    """Record in a folder what it is to hold; a folder of other settings or other content is refused.

    Where packing has failed, there is no cohort yet, and other settings may be tried.

    Raises:
        InputError: With the difference, or what is in the way.
    """
    if (out / INFO_FILE).exists():
        found, failed = read_info(out), (out / _FAILED).exists()
        (out / _FAILED).unlink(missing_ok=True)
        if found == info:
            return
        # labels may not come or go, either
        there, asked = ({"labelled": some.labelled, **some.settings} for some in (found, info))
        differences = [
            f"  {name}: {there.get(name, 'not set')} there, {asked.get(name, 'not set')} asked for"
            for name in dict.fromkeys([*there, *asked])
            if there.get(name) != asked.get(name)
        ]
        if differences and not failed:
            lines = "\n".join(differences)
            raise InputError(f"{out} was made with other settings:\n{lines}\nUse the same settings, or another folder")
    elif out.exists():
        if not out.is_dir():
            raise InputError(f"{out}: is a file; give a folder for the cohort")
        content = sorted(path.name for path in out.iterdir() if not path.name.startswith("."))
        if content:
            raise InputError(f"{out}: holds other files ({shortened(content, 3)}); give an empty folder for the cohort")
    write_info(out, info)

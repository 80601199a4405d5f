"""Read the tables that say which images belong to which bag, and check them before anything is done.

Two forms are read. One table, `bag_id,path,label[,group,split]`, where `path` is a folder of images; or a
table of bags, `bag_id,label[,group,split]`, with a table of instances, `bag_id,file[,label]`. Labels come
from columns alone, never from paths. Where bags are read without labels, to be predicted, no label is looked at.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from its2clr import far
from its2clr.cohort.splits import FEWEST_BAGS
from its2clr.cohort.tables import (
    UNKNOWN_LABEL,
    Problem,
    at_row,
    check_bag_ids,
    check_classes,
    check_groups_in_one_split,
    column_cells,
    parse_bag_labels,
    parse_groups,
    parse_instance_labels,
    parse_splits,
    raise_problems,
    read_table,
    require_columns,
)
from its2clr.files import is_there

IMAGE_SUFFIXES = (".bmp", ".dcm", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")

_ADVICE = {
    "path": "or give a table of instances in place of column 'path'",
    "label": "bags without labels, to be predicted, can be packed with --unlabelled",
}


@dataclass(frozen=True, eq=False)
class BagTable:
    """Bags to make a cohort of, checked.

    Attributes:
        path: The table.
        bags: `bag_id`, `label` (0 or 1; no such column without labels), `split` ("" if not given), `group`
            and the additional columns; the index is the row of the table.
        has_splits: Whether each bag has its split already; bags without labels are all in test.
        labelled: Whether it was read with labels.
        has_groups: Whether it says which bags belong together.
    """

    path: Path
    bags: pd.DataFrame
    has_splits: bool
    labelled: bool
    has_groups: bool = field(default=False, kw_only=True)

    @property
    def too_few(self) -> bool:
        """Whether these bags can be packed, but not divided into splits of both classes and trained with."""
        return self.labelled and len(self.bags) < FEWEST_BAGS

    def without(self, columns: Collection[str]) -> "BagTable":
        """The table less some of its columns, which need not be there."""
        return replace(self, bags=self.bags.drop(columns=list(columns), errors="ignore"))


@dataclass(frozen=True, eq=False)
class Manifest(BagTable):
    """Bags and their images, checked.

    Attributes:
        instances: `bag_id`, `file` (absolute), `name` (as written), `label` (1, 0 or -1); the index is the row of
            the instance, or of its bag if there is no table of instances.
    """

    instances: pd.DataFrame

    @property
    def has_instance_labels(self) -> bool:
        """Whether ground truth is known for any instance."""
        return bool((self.instances["label"] != UNKNOWN_LABEL).any())


def read_manifest(
    path: Path,
    instances: Path | None = None,
    images_root: Path | None = None,
    *,
    labelled: bool = True,
    positive: Collection[str] = (),
) -> Manifest:
    """Read and check a manifest.

    Args:
        path: The table of bags.
        instances: The table of instances; without it the bags need a column `path`.
        images_root: Where relative files of the table of instances lie; its own folder if not given.
        labelled: Whether bags have labels. If not, columns of labels and splits are ignored, and every bag is
            in split test.
        positive: Labels in words that mean 1, all others mean 0; none: labels are 0 and 1.

    Raises:
        InputError: With all problems of the manifest, each with file and row.
    """
    manifest, problems = check_manifest(path, instances, images_root, labelled=labelled, positive=positive)
    raise_problems(problems)
    assert manifest is not None
    return manifest


def check_manifest(
    path: Path,
    instances: Path | None = None,
    images_root: Path | None = None,
    *,
    labelled: bool = True,
    positive: Collection[str] = (),
) -> tuple[Manifest | None, list[Problem]]:
    """Read a manifest and list everything that is wrong with it.

    Args:
        path: The table of bags.
        instances: The table of instances, if there is one.
        images_root: Where relative files of the table of instances lie.
        labelled: Whether bags have labels, as for `read_manifest`.
        positive: Labels in words that mean 1, as for `read_manifest`.

    Returns:
        The manifest, None if there is any problem; and the problems.
    """
    path = Path(path)
    problems: list[Problem] = []
    table = read_table(path, problems)
    if table is None:
        return None, problems
    needed = ["bag_id", *(["path"] if instances is None else []), *(["label"] if labelled else [])]
    if not require_columns(table, path, needed, problems, _ADVICE):
        return None, problems
    if not labelled:
        table = table.drop(columns=["label", "split"], errors="ignore")
    if table.empty:
        return None, [*problems, Problem(str(path), "there are no bags below the header")]
    bags = check_bags(table, path, problems, labelled=labelled, positive=positive)
    if instances is None:
        members: pd.DataFrame | None = _list_folders(table, path, problems)
    else:
        members = _read_instances(table, path, Path(instances), images_root, problems, labelled=labelled)
    if problems or members is None:
        return None, problems
    own_columns = ["path", "n_instances"] if instances is None else ["n_instances"]
    return Manifest(**vars(bags.without(own_columns)), instances=members), problems


def check_bags(
    table: pd.DataFrame,
    path: Path,
    problems: list[Problem],
    *,
    labelled: bool = True,
    positive: Collection[str] = (),
) -> BagTable:
    """Check identifiers, labels, groups and splits of a table of bags, noting what is wrong.

    Args:
        table: The cells.
        path: Their file.
        problems: Receives what is wrong.
        labelled: Whether bags have labels; if not, every bag is in test.
        positive: Labels in words that mean 1; see `parse_bag_labels`.

    Returns:
        The bags with the core columns first.
    """
    before = len(problems)
    check_bag_ids(table, path, problems)
    labels = parse_bag_labels(table, path, problems, positive) if labelled else []
    groups = parse_groups(table, path, problems)
    splits = parse_splits(table, path, problems) if labelled else ["test"] * len(table)
    cells_are_good = len(problems) == before
    if splits is not None:
        check_groups_in_one_split(table.index.tolist(), groups, splits, path, problems)
    if labelled and cells_are_good and len(table) >= FEWEST_BAGS:
        check_classes(labels, splits, str(path), problems)
    label = {"label": labels} if labelled else {}
    core = {"bag_id": table["bag_id"].tolist(), **label, "split": splits or "", "group": groups}
    more = {str(name): table[name].tolist() for name in table.columns if name not in core}
    bags = pd.DataFrame({**core, **more}, index=table.index)
    has_groups = "group" in table.columns and any(table["group"])
    return BagTable(path, bags, has_splits=splits is not None, labelled=labelled, has_groups=has_groups)


def _list_folders(table: pd.DataFrame, path: Path, problems: list[Problem]) -> pd.DataFrame:
    """The images directly in the folder of each bag, by name."""
    rows: list[int] = []
    members: list[tuple[str, str, str, int]] = []
    for (row, cell), bag_id in zip(column_cells(table, "path"), table["bag_id"].tolist(), strict=True):
        where = at_row(path, row)
        folder = far.below(path.parent, cell)
        if not cell:
            problems.append(Problem(where, "path is empty, expected a folder of images"))
            continue
        if not (far.is_far(folder) or (is_there(folder) and folder.is_dir())):
            reason = "is not a folder" if is_there(folder) else "does not exist"
            problems.append(Problem(where, f"path {cell!r} {reason} ({folder})"))
            continue
        files = list_images(folder)
        if not files:
            there = f"none directly in {far.address_of(folder)} ({', '.join(IMAGE_SUFFIXES)})"
            message = f"bag {bag_id!r} has no images: {there}"
            problems.append(Problem(where, message))
        rows += [row] * len(files)
        members += [(bag_id, str(file), file.name, UNKNOWN_LABEL) for file in files]
    return _instance_table(members, rows)


def list_images(folder: Path) -> list[Path]:
    """The image files directly in a folder, sorted by name; hidden files are no images."""
    return sorted(
        file for file in far.files_in(folder) if file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".")
    )


def _read_instances(
    bags: pd.DataFrame,
    bags_path: Path,
    path: Path,
    images_root: Path | None,
    problems: list[Problem],
    *,
    labelled: bool,
) -> pd.DataFrame | None:
    table = read_table(path, problems)
    if table is None or not require_columns(table, path, ("bag_id", "file"), problems):
        return None
    root = far.absolute(path.parent if images_root is None else Path(images_root))
    if not (far.is_far(root) or root.is_dir()):
        problems.append(Problem(str(root), "the folder of the images does not exist"))
        return None
    known = set(bags["bag_id"].tolist())
    names = table["file"].tolist()
    for (row, bag_id), name in zip(column_cells(table, "bag_id"), names, strict=True):
        if bag_id not in known:
            message = f"bag_id {bag_id!r} is not in {bags_path}" if bag_id else "bag_id is empty"
            problems.append(Problem(at_row(path, row), message))
        if not name:
            problems.append(Problem(at_row(path, row), "file is empty"))
    filled = set(table["bag_id"].tolist())
    problems += [
        Problem(at_row(bags_path, row), f"bag {bag_id!r} has no instances in {path}")
        for row, bag_id in column_cells(bags, "bag_id")
        if bag_id and bag_id not in filled
    ]
    labels = [UNKNOWN_LABEL] * len(table)
    if labelled and "label" in table.columns:
        labels = parse_instance_labels(table, path, problems)
    files = [far.below(root, name) for name in names]
    # single missing images are left out when packing; if there are none at all, the folder is wrong
    if names and not any(far.is_far(file) or is_there(file) for file in files):
        message = f"none of the files exist, the first would be {files[0]}; is the images root {root} right?"
        problems.append(Problem(at_row(path, table.index.tolist()[0]), message))
    members = list(zip(table["bag_id"].tolist(), map(str, files), names, labels, strict=True))
    return _instance_table(members, table.index.tolist())


def _instance_table(members: Sequence[tuple[str, str, str, int]], rows: list[int]) -> pd.DataFrame:
    columns = ["bag_id", "file", "name", "label"]
    return pd.DataFrame(members, columns=columns, index=pd.Index(rows, name="row", dtype="int64"))

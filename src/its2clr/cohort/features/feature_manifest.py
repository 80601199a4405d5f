"""Read a table of bags and find the feature file of each."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from its2clr import far
from its2clr.cohort.features.layouts import SUFFIXES, find_feature_files
from its2clr.cohort.features.tile_grids import FeatureProblem
from its2clr.cohort.layout import LeftOut
from its2clr.cohort.manifest import BagTable, check_bags
from its2clr.cohort.slides.slide_manifest import parse_scales
from its2clr.cohort.tables import Problem, raise_problems, read_columns
from its2clr.errors import InputError
from its2clr.files import is_there
from its2clr.units import MicronsPerPixel

_OWN_COLUMNS = ("features", "file", "mpp", "path", "n_instances")


@dataclass(frozen=True)
class FeatureBag:
    """One bag to be packed.

    Attributes:
        bag_id: The bag.
        row: Its row in the table.
        file: Its feature file.
        slide: The slide it was made from; None if not named.
        mpp: Microns per pixel of the slide's level 0, as the table says; None if it does not.
    """

    bag_id: str
    row: int
    file: Path
    slide: Path | None = None
    mpp: MicronsPerPixel | None = None


@dataclass(frozen=True, eq=False)
class FeatureManifest(BagTable):
    """Bags and their feature files, checked.

    Attributes:
        files: The bags whose feature file was found.
        left_out: Those without, and why.
    """

    files: tuple[FeatureBag, ...]
    left_out: tuple[LeftOut, ...] = ()


def read_feature_manifest(
    path: Path,
    features: Path,
    *,
    labelled: bool = True,
    slides_root: Path | None = None,
    positive: Collection[str] = (),
) -> FeatureManifest:
    """Read a table of bags and find the feature file of each.

    The table has the columns `bag_id`, `label`, and if wanted `split`, `group`, `features` (the feature file, where its
    name is not the bag's), `file` (the slide) and `mpp` (microns per pixel of its level 0).

    Args:
        path: The table.
        features: Folder of feature files; folders below it are searched too.
        labelled: Whether bags have labels; if not, all are in test.
        slides_root: Where relative slides lie; the table's folder if None.
        positive: Labels in words that mean 1, all others mean 0; none: labels are 0 and 1.

    Raises:
        InputError: The table is wrong, or the folder holds no feature files.
    """
    path, features = Path(path), Path(features)
    problems: list[Problem] = []
    table = read_columns(path, ["bag_id", *(["label"] if labelled else [])])
    if table.empty:
        raise InputError(f"{path}: there are no bags below the header")
    if not labelled:
        table = table.drop(columns=["label", "split"], errors="ignore")
    checked = check_bags(table, path, problems, labelled=labelled, positive=positive)
    scales = parse_scales(table, path, problems)
    raise_problems(problems)
    files = _feature_files(features)
    root = path.parent if slides_root is None else Path(slides_root)
    bags, left_out = [], []
    for row, cells in zip(table.index.tolist(), table.to_dict("records"), strict=True):
        bag_id = str(cells["bag_id"])
        try:
            file = _file_of(bag_id, str(cells.get("features", "")), features, files)
        except FeatureProblem as problem:
            left_out.append(LeftOut(bag_id, "", row, str(problem)))
            continue
        slide = far.below(root, str(cells["file"])) if cells.get("file") else None
        bags.append(FeatureBag(bag_id, row, file, slide, scales.get(row)))
    if not bags:
        raise InputError(f"{features}: no bag of {path} has a feature file here; {left_out[0].problem}")
    return FeatureManifest(**vars(checked.without(_OWN_COLUMNS)), files=tuple(bags), left_out=tuple(left_out))


def _feature_files(folder: Path) -> dict[str, list[Path]]:
    if not far.is_folder(folder):
        raise InputError(f"{folder}: is no folder; name the folder of the feature files")
    files = find_feature_files(folder)
    if not files:
        raise InputError(f"{folder}: there are no feature files in this folder ({', '.join(SUFFIXES)})")
    return files


def _file_of(bag_id: str, named: str, folder: Path, files: Mapping[str, Sequence[Path]]) -> Path:
    if named:
        file = Path(named) if far.is_far(named) else folder / named
        if not (far.is_far(file) or is_there(file)):
            raise FeatureProblem(f"{file}: there is no such feature file")
        return file
    found = files.get(bag_id) or files.get(Path(bag_id).stem)
    if not found:
        raise FeatureProblem(f"there is no feature file {bag_id}.h5 or {bag_id}.pt in {folder}")
    if len(found) > 1:
        several = " and ".join(str(path.relative_to(folder)) for path in found[:2])
        raise FeatureProblem(
            f"there are {len(found)} feature files of this bag ({several}); name the folder of one kind"
        )
    return found[0]

"""Make a cohort of features: a table of labels and a folder of feature files become a cohort folder without tiles."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from its2clr.cohort.features.layouts import (
    FeatureHeader,
    FeatureProblem,
    PlacedFeatures,
    find_feature_files,
    read_foreign_features,
    read_header,
)
from its2clr.cohort.finish import plan_splits, settle_splits
from its2clr.cohort.layout import (
    BAGS_FILE,
    PROBLEMS_FILE,
    CohortInfo,
    LeftOut,
    claim_folder,
    tile_path,
    write_bags,
    write_problems,
)
from its2clr.cohort.manifest import Manifest, check_bags
from its2clr.cohort.parallel import Progress, map_in_threads
from its2clr.cohort.slides.scale import check_mpp, is_sane
from its2clr.cohort.slides.slide_image import SlideProblem, open_slide
from its2clr.cohort.splits import DEFAULT_FRACTIONS
from its2clr.cohort.table_checks import UNKNOWN_LABEL
from its2clr.cohort.tables import Problem, at_row, column_cells, raise_problems, read_bag_table, require_columns
from its2clr.cohort.tiles import read_tiles, write_feature_tiles
from its2clr.errors import InputError

SOURCE = "features"
"""What `cohort.json` says such a cohort was made from."""
EXTRACTORS = "extractors"
"""The setting that names what made the features, as far as the files say it."""
_FINGERPRINT = "fingerprint"
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
    mpp: float | None = None


@dataclass(frozen=True, eq=False)
class FeatureManifest:
    """Bags and their feature files, checked.

    Attributes:
        manifest: The table, as for images; an instance is a feature file.
        bags: Those whose feature file was found.
        left_out: Those without, and why.
    """

    manifest: Manifest
    bags: tuple[FeatureBag, ...]
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True)
class FeatureSummary:
    """What packing did.

    Attributes:
        path: The cohort folder.
        n_bags: Bags in it.
        n_instances: Their instances.
        feature_dim: Features of an instance.
        layouts: Files by the program that wrote them.
        left_out: What is not in it, and why.
        notes: What was assumed, with the number of files.
    """

    path: Path
    n_bags: int
    n_instances: int
    feature_dim: int
    layouts: dict[str, int]
    left_out: tuple[LeftOut, ...]
    notes: dict[str, int]

    def lines(self) -> list[str]:
        """The closing words."""
        kinds = ", ".join(f"{count} of {layout}" for layout, count in sorted(self.layouts.items()))
        size = f"{self.n_instances} instances of {self.feature_dim} features"
        lines = [f"{self.path}: {self.n_bags} bags, {size}; files: {kinds}"]
        if self.left_out:
            lines.append(f"left out: {len(self.left_out)} bags ({self.path / PROBLEMS_FILE})")
        return [*lines, *(f"note: {note} ({count} files)" for note, count in self.notes.items())]


@dataclass(frozen=True, eq=False)
class _Packed:
    count: int = 0
    notes: tuple[str, ...] = ()
    left_out: LeftOut | None = None


def read_feature_manifest(
    path: Path, features: Path, *, labelled: bool = True, slides_root: Path | None = None
) -> FeatureManifest:
    """Read a table of bags and find the feature file of each.

    The table has the columns `bag_id`, `label`, and if wanted `split`, `group`, `features` (the feature file, where its
    name is not the bag's), `file` (the slide) and `mpp` (microns per pixel of its level 0).

    Args:
        path: The table.
        features: Folder of feature files; folders below it are searched too.
        labelled: Whether bags have labels; if not, all are in test.
        slides_root: Where relative slides lie; the table's folder if None.

    Raises:
        InputError: The table is wrong, or the folder holds no feature files.
    """
    path, features = Path(path), Path(features)
    problems: list[Problem] = []
    table = read_bag_table(path)
    if not labelled:
        table = table.drop(columns=["label", "split"], errors="ignore")
    require_columns(table, path, ["bag_id", *(["label"] if labelled else [])], problems)
    raise_problems(problems or ([Problem(str(path), "there are no bags below the header")] if table.empty else []))
    checked, has_splits = check_bags(table, path, problems, labelled=labelled)
    scales = _scales(table, path, problems)
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
        slide = (root / str(cells["file"])).absolute() if cells.get("file") else None
        bags.append(FeatureBag(bag_id, row, file, slide, scales[row]))
    if not bags:
        raise InputError(f"{features}: no bag of {path} has a feature file here; {left_out[0].problem}")
    members = [(bag.bag_id, str(bag.file), bag.file.name, UNKNOWN_LABEL) for bag in bags]
    instances = pd.DataFrame(members, columns=["bag_id", "file", "name", "label"], index=[bag.row for bag in bags])
    kept = checked.drop(columns=[name for name in _OWN_COLUMNS if name in checked.columns])
    manifest = Manifest(path, kept, instances, has_splits, labelled)
    return FeatureManifest(manifest, tuple(bags), tuple(left_out))


def pack_features(
    manifest: FeatureManifest,
    out: Path,
    *,
    coords: Path | None = None,
    seed: int = 0,
    fractions: Sequence[float] = DEFAULT_FRACTIONS,
    workers: int | None = None,
    progress: Progress | None = None,
) -> FeatureSummary:
    """Make the cohort; a file that cannot be used is a row in `problems.csv`, and the rest goes on.

    Args:
        manifest: Bags and their feature files.
        out: The cohort folder; new, empty, or begun with the same settings.
        coords: Folder of CLAM's `patches`, where it is not beside the features.
        seed: Chooses the splits, if the table has none.
        fractions: Shares of train, val and test, if the table has no splits.
        workers: Threads; the processors at hand if None.
        progress: Called with the number of bags done and of all bags.

    Raises:
        InputError: The files hold different numbers of features, the folder holds something else, no bag is left, or
            a split lacks a class because bags were left out.
    """
    out = Path(out)
    left_out = list(manifest.left_out)
    headers: dict[str, FeatureHeader] = {}
    for bag, header in zip(manifest.bags, map_in_threads(_header, manifest.bags, workers), strict=True):
        if isinstance(header, LeftOut):
            left_out.append(header)
        else:
            headers[bag.bag_id] = header
    if not headers:
        raise InputError(f"{manifest.manifest.path}: no feature file can be used; {left_out[-1].problem}")
    feature_dim = _one_dimension(manifest.bags, headers)
    usable = [bag for bag in manifest.bags if bag.bag_id in headers]
    tile_size = _tile_size(usable, coords)
    extractors = sorted({header.extractor for header in headers.values()} - {""})
    settings = {
        "source": SOURCE,
        "feature_dim": feature_dim,
        EXTRACTORS: extractors,
        **plan_splits(manifest.manifest, fractions, seed),
    }
    info = CohortInfo(
        tile_size=tile_size,
        encoding="features",
        kind="features",
        feature_dim=feature_dim,
        labelled=manifest.manifest.labelled,
        settings=settings,
    )
    claim_folder(out, info)
    counts: dict[str, int] = {}
    notes: Counter[str] = Counter()
    for done, (bag, packed) in enumerate(
        zip(usable, map_in_threads(partial(_pack, out=out, coords=coords), usable, workers), strict=True), start=1
    ):
        if packed.left_out is not None:
            left_out.append(packed.left_out)
        else:
            counts[bag.bag_id] = packed.count
            notes.update(packed.notes)
        if progress is not None:
            progress(done, len(usable))
    left_out.sort(key=lambda one: one.row)
    write_problems(out, left_out)
    table = manifest.manifest.bags
    kept = table[table["bag_id"].isin(list(counts))]
    kept = kept.assign(n_instances=[counts[bag_id] for bag_id in kept["bag_id"].tolist()])
    kept = settle_splits(kept, manifest.manifest, out, fractions, seed)
    write_bags(out, kept)
    layouts: Counter[str] = Counter(headers[bag_id].layout for bag_id in counts)
    total = int(kept["n_instances"].sum())
    return FeatureSummary(out, len(kept), total, feature_dim, dict(layouts), tuple(left_out), dict(notes))


def _scales(table: pd.DataFrame, path: Path, problems: list[Problem]) -> dict[int, float | None]:
    scales: dict[int, float | None] = dict.fromkeys(table.index.tolist())
    for row, cell in column_cells(table, "mpp") if "mpp" in table.columns else ():
        if not cell:
            continue
        try:
            check_mpp(float(cell), "mpp")
            scales[row] = float(cell)
        except (ValueError, InputError):
            problems.append(Problem(at_row(path, row), f"mpp is {cell!r}, expected microns per pixel of level 0"))
    return scales


def _feature_files(folder: Path) -> dict[str, list[Path]]:
    if not folder.is_dir():
        raise InputError(f"{folder}: is no folder; name the folder of the feature files")
    files = find_feature_files(folder)
    if not files:
        raise InputError(f"{folder}: there are no feature files in this folder (.h5, .hdf5, .pt)")
    return files


def _file_of(bag_id: str, named: str, folder: Path, files: dict[str, list[Path]]) -> Path:
    if named:
        if not (folder / named).is_file():
            raise FeatureProblem(f"{folder / named}: there is no such feature file")
        return folder / named
    found = files.get(bag_id) or files.get(Path(bag_id).stem)
    if not found:
        raise FeatureProblem(f"there is no feature file {bag_id}.h5 or {bag_id}.pt in {folder}")
    if len(found) > 1:
        several = " and ".join(str(path.relative_to(folder)) for path in found[:2])
        raise FeatureProblem(
            f"there are {len(found)} feature files of this bag ({several}); name the folder of one kind"
        )
    return found[0]


def _header(bag: FeatureBag) -> FeatureHeader | LeftOut:
    try:
        return read_header(bag.file)
    except FeatureProblem as problem:
        return _left_out(bag, problem)


def _left_out(bag: FeatureBag, problem: InputError) -> LeftOut:
    return LeftOut(bag.bag_id, str(bag.file), bag.row, str(problem).removeprefix(f"{bag.file}: "))


def _one_dimension(bags: Sequence[FeatureBag], headers: dict[str, FeatureHeader]) -> int:
    """The number of features, which all files must share.

    Raises:
        InputError: They do not.
    """
    examples = {headers[bag.bag_id].feature_dim: bag.file for bag in bags if bag.bag_id in headers}
    if len(examples) > 1:
        counts = Counter(header.feature_dim for header in headers.values())
        kinds = "; ".join(f"{dim} in {counts[dim]} files, such as {examples[dim]}" for dim in sorted(examples))
        raise InputError(f"the files hold different numbers of features: {kinds}. Give files of one encoder only")
    return next(iter(examples))


def _tile_size(bags: Sequence[FeatureBag], coords: Path | None) -> int:
    """Pixels of the tiles as the encoder saw them, of the first file that can be read."""
    problems = []
    for bag in bags:
        try:
            return read_foreign_features(bag.file, coords=coords).tile_size
        except FeatureProblem as problem:
            problems.append(problem)
    raise InputError(f"no feature file can be used; {problems[0]}")


def _pack(bag: FeatureBag, *, out: Path, coords: Path | None) -> _Packed:
    path = tile_path(out, bag.bag_id)
    try:
        mpp, size = _slide_facts(bag)
        fingerprint = _fingerprint(bag, coords, mpp, size)
        there = _whole(path, fingerprint)
        if there is not None:
            return there
        found = read_foreign_features(bag.file, mpp=mpp, coords=coords)
        _check_inside(found, size)
    except FeatureProblem as problem:
        path.unlink(missing_ok=True)
        return _Packed(left_out=_left_out(bag, problem))
    (out / BAGS_FILE).unlink(missing_ok=True)  # while bags are being written the folder must not look complete
    write_feature_tiles(
        path,
        found.features,
        found.coords,
        [f"{x}_{y}" for x, y in found.coords.tolist()],
        bag_id=bag.bag_id,
        tile_size=found.tile_size,
        tile_size_level0=found.tile_size_level0,
        mpp=found.mpp_level0 * found.tile_size_level0 / found.tile_size,
        source=str(bag.file.absolute() if bag.slide is None else bag.slide),
        attributes={
            **({} if found.magnification is None else {"magnification": found.magnification}),
            **({} if found.overlap is None else {"overlap": found.overlap}),
            _FINGERPRINT: fingerprint,
            "mpp_level0": found.mpp_level0,
            "feature_file": str(bag.file.absolute()),
            "layout": found.layout,
            "extractor": found.extractor,
            "notes": json.dumps(found.notes),
        },
    )
    return _Packed(len(found.features), found.notes)


def _slide_facts(bag: FeatureBag) -> tuple[float | None, tuple[int, int] | None]:
    """Microns per pixel of level 0 by the table or the slide, and the slide's size; None where unknown."""
    if bag.slide is None:
        return bag.mpp, None
    try:
        with open_slide(bag.slide) as reader:
            size = (reader.levels[0].width, reader.levels[0].height)
            said = reader.mpp
    except SlideProblem as problem:
        raise FeatureProblem(f"its slide {bag.slide} cannot be read: {problem}") from problem
    if bag.mpp is not None or said is None or not all(is_sane(mpp) for mpp in said):
        return bag.mpp, size
    return said[0], size  # as STAMP does


def _check_inside(found: PlacedFeatures, size: tuple[int, int] | None) -> None:
    if size is None:
        return
    corner = found.coords.max(axis=0)
    if (corner >= np.array(size)).any() or (found.coords < -found.tile_size_level0).any():
        raise FeatureProblem(
            f"its tiles reach to {tuple(corner.tolist())}, but its slide has {size[0]} x {size[1]} px: "
            "it is another slide, or its scale (mpp) is wrong"
        )


def _fingerprint(bag: FeatureBag, coords: Path | None, mpp: float | None, size: tuple[int, int] | None) -> str:
    status = bag.file.stat()
    content = [str(bag.file), status.st_size, status.st_mtime_ns, str(bag.slide), str(coords), mpp, size]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _whole(path: Path, fingerprint: str) -> _Packed | None:
    """What is packed already, from the same file."""
    if not path.exists():
        return None
    try:
        tiles = read_tiles(path)
    except InputError:
        return None
    if tiles.attributes.get(_FINGERPRINT) != fingerprint:
        return None
    return _Packed(len(tiles), tuple(json.loads(tiles.attributes["notes"])))

"""Examine a cohort folder, or a manifest, and list everything that is wrong or worth knowing."""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from its2clr.cohort.findings import (
    NO_LABELS,
    Finding,
    Level,
    SlideQuestions,
    count_bags,
    errors_of,
    judge_sizes,
    judge_table,
    judge_validation,
)
from its2clr.cohort.identity import recorded_contents
from its2clr.cohort.image_files import ImageProblem, prepare_image
from its2clr.cohort.layout import BAGS_FILE, PROBLEMS_FILE, TILES_FOLDER, read_bags, read_info, tile_path
from its2clr.cohort.manifest import Manifest, check_manifest
from its2clr.cohort.parallel import map_in_threads
from its2clr.cohort.splits import SPLITS
from its2clr.cohort.tables import (
    TABLES,
    UNKNOWN_LABEL,
    Problem,
    at_row,
    check_classes,
    column_cells,
    contradiction,
    read_table,
)
from its2clr.cohort.tiles import TileFile, decode, read_content, read_features, read_tiles, written_content
from its2clr.errors import InputError
from its2clr.files import stamp
from its2clr.units import TilePixels

_Labels = npt.NDArray[np.int8]

_EXAMPLES = 5
_DIGEST = "S16"
_FLAT = 2.0  # grey values; background tiles are alike in every slide and leak nothing


@dataclass
class _Inspection:
    """What one tile file holds."""

    findings: list[Finding] = field(default_factory=list)
    digests: npt.NDArray[np.bytes_] = field(default_factory=lambda: np.array([], dtype=_DIGEST))
    labels: _Labels | None = None


def examine(
    path: str | Path,
    decode: bool = True,
    *,
    instances: Path | None = None,
    images_root: Path | None = None,
    labelled: bool = True,
    positive: Sequence[str] = (),
    features: Path | None = None,
    slides: SlideQuestions | None = None,
    workers: int | None = None,
) -> list[Finding]:
    """Examine a cohort folder, or a manifest if the path is a table; nothing is changed.

    What a table lists is seen from its columns: `path` (folders of images) or a table of instances, or else slides.

    Args:
        path: The cohort folder or the table of bags, slides or features.
        decode: Whether to decode every image, which finds damaged ones and takes longest.
        instances: The table of instances of a manifest.
        images_root: Where relative files of the table of instances lie.
        labelled: Whether the bags of a manifest have labels; a cohort folder says so itself.
        positive: Labels in words that mean 1, of a manifest.
        features: Folder of feature files, for a manifest of features.
        slides: What is asked of a manifest of slides.
        workers: Threads; the processors at hand if None.

    Returns:
        Errors first, then warnings, then notes.
    """
    path = Path(path)
    if path.suffix.lower() not in TABLES:
        findings = _examine_cohort(path, decode, workers)
    elif features is not None:
        from its2clr.cohort.features.feature_doctor import examine_features

        slides_root = None if slides is None else slides.slides_root
        findings = examine_features(
            path, features, labelled=labelled, positive=positive, slides_root=slides_root, workers=workers
        )
    elif instances is None and _lists_slides(path):
        from its2clr.cohort.slides.slide_doctor import examine_slides

        findings = examine_slides(
            path, slides or SlideQuestions(), labelled=labelled, positive=positive, workers=workers
        )
    else:
        checked = check_manifest(path, instances, images_root, labelled=labelled, positive=positive)
        findings = _examine_manifest(*checked, path if instances is None else Path(instances), decode, workers)
    order: dict[Level, int] = {"error": 0, "warning": 1, "note": 2}
    return sorted(findings, key=lambda finding: order[finding.level])


def _lists_slides(path: Path) -> bool:
    """Whether a table is one of slides: it has no folders of images."""
    table = read_table(path, [])
    return table is not None and "path" not in table.columns


def _examine_manifest(
    manifest: Manifest | None, problems: list[Problem], table: Path, decode_all: bool, workers: int | None
) -> Iterator[Finding]:
    """Judge a manifest; `table` is the one whose rows name the images."""
    yield from errors_of(problems)
    if manifest is None:
        return
    path = manifest.path
    if decode_all:
        files = [Path(file) for file in manifest.instances["file"].tolist()]
        rows = manifest.instances.index.tolist()
        for row, file, problem in zip(rows, files, map_in_threads(_image_problem, files, workers), strict=True):
            if problem is not None:
                yield Finding("warning", at_row(table, row), f"{file}: {problem}; will be left out")
    names = manifest.bags["bag_id"].tolist()
    labels = {str(name): one["label"].to_numpy(dtype=np.int8) for name, one in manifest.instances.groupby("bag_id")}
    bags = manifest.bags.assign(n_instances=[len(labels[name]) for name in names])
    yield from judge_sizes(bags, path)
    yield from judge_table(replace(manifest, bags=bags))
    if manifest.has_instance_labels:
        for row, name, label in zip(bags.index.tolist(), names, bags["label"].tolist(), strict=True):
            yield from _contradictions(at_row(path, row), name, label, labels[name])
        yield from _witness_rate(bags, [labels[name] for name in names], path)


def _image_problem(file: Path) -> str | None:
    try:
        prepare_image(file, tile_size=TilePixels(1), encoding="png", resize="nearest")
    except ImageProblem as problem:
        return str(problem)
    return None


def _examine_cohort(folder: Path, decode_all: bool, workers: int | None) -> Iterator[Finding]:
    try:
        info = read_info(folder)
    except InputError as error:
        yield Finding("error", str(folder), str(error).removeprefix(f"{folder}: "))
        return
    problems: list[Problem] = []
    bags = read_bags(folder, problems, labelled=info.labelled)
    if bags is not None and info.labelled:
        check_classes(bags["label"].tolist(), bags["split"].tolist(), str(folder / BAGS_FILE), problems)
    yield from errors_of(problems)
    if bags is None:
        yield from _left_out(folder)
        return
    labels = bags["label"].tolist() if info.labelled else [None] * len(bags)
    recorded = recorded_contents(folder)
    inspect = partial(_inspect_bag, folder=folder, tile_size=info.tile_size, decode_all=decode_all, recorded=recorded)
    rows = list(zip(bags["bag_id"].tolist(), labels, bags["n_instances"].tolist(), strict=True))
    inspections = list(map_in_threads(inspect, rows, workers))
    for inspection in inspections:
        yield from inspection.findings
    yield from _shared_images(folder, bags, inspections)
    if info.labelled:
        yield from judge_validation(bags, folder)
    else:
        yield Finding("note", str(folder), NO_LABELS)
    yield from judge_sizes(bags, folder)
    yield from _orphans(folder, bags)
    yield from _left_out(folder)
    yield from count_bags(bags, folder)
    ground_truth = [one.labels for one in inspections]
    if info.has_instance_labels != any(found is not None for found in ground_truth):
        says = "instance labels" if info.has_instance_labels else "no instance labels"
        yield Finding("error", str(folder), f"cohort.json says there are {says}, the tile files of its bags disagree")
    if info.labelled:
        yield from _witness_rate(bags, ground_truth, folder)


def _inspect_bag(
    bag: tuple[str, int | None, int],
    *,
    folder: Path,
    tile_size: TilePixels,
    decode_all: bool,
    recorded: Mapping[str, Sequence[Sequence[Any]]],
) -> _Inspection:
    bag_id, label, n_instances = bag
    path = tile_path(folder, bag_id)
    result = _Inspection()
    try:
        tiles = read_tiles(path)
        encoded = _contents(tiles)
        wrong_places = int((tiles.coords < 0).any(axis=1).sum())
        result.labels = tiles.labels
        result.findings += _inspect_content(path, recorded.get(bag_id, ()))
    except InputError as error:
        result.findings.append(Finding("error", str(path), str(error).removeprefix(f"{path}: ")))
        return result
    messages = []
    if tiles.bag_id != bag_id:
        messages.append(f"belongs to bag {tiles.bag_id!r}, not {bag_id!r}")
    if len(tiles) != n_instances:
        messages.append(f"holds {len(tiles)} images, bags.csv says {n_instances}")
    if tiles.has_images and tiles.tile_size != tile_size:
        messages.append(f"its tile size is {tiles.tile_size}, that of the cohort {tile_size}")
    if wrong_places:
        messages.append(f"{wrong_places} coordinates are negative")
    if result.labels is not None and not np.isin(result.labels, (-1, 0, 1)).all():
        messages.append("instance labels must be 1, 0 or -1")
    result.findings += [Finding("error", str(path), message) for message in messages]
    if label is not None and result.labels is not None:
        result.findings += _contradictions(str(path), bag_id, label, result.labels)
    result.digests = np.array([hashlib.blake2b(image, digest_size=16).digest() for image in encoded], dtype=_DIGEST)
    repeated = len(encoded) - len(np.unique(result.digests))
    if repeated:
        result.findings.append(Finding("note", str(path), f"{repeated} images repeat another of the bag"))
    if decode_all and tiles.has_images:
        result.findings += _inspect_images(tiles, encoded)
    return result


def _inspect_content(path: Path, recorded: Sequence[Sequence[Any]]) -> Iterator[Finding]:
    """Whether a tile file still holds what was packed, and what is kept about it; all of it is read."""
    now, packed, place = read_content(path), written_content(path), stamp(path)
    if packed is not None and now.tiles != packed.tiles:
        message = "its tiles are not those that were packed: it was edited or is damaged; make the cohort again"
        yield Finding("error", str(path), message)
    elif packed is not None and now.labels != packed.labels:
        yield Finding("warning", str(path), "the labels of its instances were edited since it was packed")
    if any(list(entry[:3]) == place and tuple(entry[3:]) != now for entry in recorded):
        message = f"changed while size and time stayed, so commands take it for what it was; run `touch {path}`"
        yield Finding("error", str(path), message)


def _contents(tiles: TileFile) -> list[bytes]:
    """What each instance is: its encoded image, or its features."""
    if tiles.has_images:
        return [tiles.encoded(number) for number in range(len(tiles))]
    features = read_features(tiles.path)
    if not np.isfinite(features).all():
        raise InputError(f"{tiles.path}: has features that are not finite")
    return [row.tobytes() for row in features]


def _inspect_images(tiles: TileFile, encoded: list[bytes]) -> Iterator[Finding]:
    for number, content in enumerate(encoded):
        where = f"{tiles.path}, image {number}"
        try:
            height, width = decode(content).shape[:2]
        except InputError as error:
            yield Finding("error", where, str(error))
            continue
        if (height, width) != (tiles.tile_size, tiles.tile_size):
            message = f"is {width} x {height} pixels, expected {tiles.tile_size} x {tiles.tile_size}"
            yield Finding("error", where, message)


def _contradictions(where: str, bag_id: str, label: int, labels: _Labels) -> Iterator[Finding]:
    found = contradiction(label, labels)
    if found is not None:
        yield Finding("error", where, f"bag {bag_id!r} {found}")


def _shared_images(folder: Path, bags: pd.DataFrame, inspections: list[_Inspection]) -> Iterator[Finding]:
    """Identical images in two splits; flat ones (background) do not count."""
    bag_ids, splits = bags["bag_id"].tolist(), bags["split"].tolist()
    shared: defaultdict[tuple[str, ...], list[list[tuple[int, int]]]] = defaultdict(list)
    for members in _repeated([inspection.digests for inspection in inspections]):
        between = {splits[row] for row, _ in members}
        if len(between) > 1 and not _is_flat(folder, bag_ids[members[0][0]], members[0][1]):
            shared[tuple(name for name in SPLITS if name in between)].append(members)
    for names, found in sorted(shared.items()):
        examples = "; ".join(
            " = ".join(f"{bag_ids[row]!r} image {number}" for row, number in members[:3])
            for members in found[:_EXAMPLES]
        )
        message = f"{len(found)} images are the same in {' and '.join(names)}, so splits leak: {examples}"
        yield Finding("error", str(folder), message)


def _repeated(digests: Sequence[npt.NDArray[np.bytes_]]) -> Iterator[list[tuple[int, int]]]:
    """Row and number of the images that there are several times, image by image; by sorting, to hold few objects."""
    starts = np.cumsum([0, *map(len, digests)])
    together = np.concatenate([np.array([], dtype=_DIGEST), *digests])
    order = np.argsort(together, kind="stable")
    first = np.flatnonzero(np.concatenate([[True], together[order[1:]] != together[order[:-1]]]))
    ends = np.append(first[1:], len(order))
    groups = (order[start:end] for start, end in zip(first, ends, strict=True) if end - start > 1)
    for group in sorted(groups, key=lambda members: int(members[0])):
        rows = np.searchsorted(starts, group, side="right") - 1
        yield list(zip(rows.tolist(), (group - starts[rows]).tolist(), strict=True))


def _is_flat(folder: Path, bag_id: str, number: int) -> bool:
    try:
        tiles = read_tiles(tile_path(folder, bag_id))
        return tiles.has_images and float(decode(tiles.encoded(number)).std(axis=(0, 1)).max()) < _FLAT
    except InputError:
        return False


def _orphans(folder: Path, bags: pd.DataFrame) -> Iterator[Finding]:
    wanted = {tile_path(folder, bag_id).name for bag_id in bags["bag_id"].tolist()}
    there = sorted(path.name for path in (folder / TILES_FOLDER).glob("*.h5") if path.name not in wanted)
    if there:
        message = f"{len(there)} tile files belong to no bag of {BAGS_FILE}, such as {there[0]}"
        yield Finding("warning", str(folder / TILES_FOLDER), message)


def _left_out(folder: Path) -> Iterator[Finding]:
    path = folder / PROBLEMS_FILE
    table = read_table(path, []) if path.exists() else None
    if table is None or not {"bag_id", "file", "problem"} <= set(table.columns):
        return
    rows = zip(column_cells(table, "bag_id"), table["file"].tolist(), table["problem"].tolist(), strict=True)
    for (row, bag_id), file, problem in rows:
        yield Finding("warning", at_row(path, row), f"bag {bag_id!r}{f', {file}' if file else ''}: {problem}")


def _witness_rate(bags: pd.DataFrame, labels: Sequence[_Labels | None], where: Path) -> Iterator[Finding]:
    pairs = zip(bags["label"].tolist(), labels, strict=True)
    known = [found[found != UNKNOWN_LABEL] for label, found in pairs if label == 1 and found is not None]
    total = sum(len(found) for found in known)
    if total:
        positives = sum(int((found == 1).sum()) for found in known)
        message = f"witness rate {positives / total:.3f}: {positives} of {total} labelled instances in positive bags"
        yield Finding("note", str(where), message)

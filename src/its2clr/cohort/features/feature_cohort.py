"""Make a cohort of features: each bag's feature file, whatever program wrote it, becomes a tile file without images."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from its2clr import far
from its2clr.cohort.features.feature_manifest import FeatureBag, FeatureManifest
from its2clr.cohort.features.layouts import FeatureHeader, PlacedFeatures, read_foreign_features, read_header
from its2clr.cohort.features.tile_grids import FeatureProblem
from its2clr.cohort.layout import PROBLEMS_FILE, CohortInfo, LeftOut
from its2clr.cohort.packing import (
    FINGERPRINT,
    BagResult,
    PackSummary,
    SplitPlan,
    file_stamp,
    fingerprint,
    pack_cohort,
    path_to_write,
    whole_tile_file,
)
from its2clr.cohort.parallel import Progress, map_in_threads
from its2clr.cohort.slides.slide_image import SlideProblem, believable, open_slide, slide_size
from its2clr.cohort.splits import DEFAULT_FRACTIONS
from its2clr.cohort.tiles import write_feature_tiles
from its2clr.errors import InputError
from its2clr.units import Level0Size, MicronsPerPixel, TilePixels, tile_mpp

SOURCE = "features"
"""What `cohort.json` says such a cohort was made from."""
EXTRACTORS = "extractors"
"""The setting that names what made the features, as far as the files say it."""


@dataclass(frozen=True)
class FeatureSummary(PackSummary):
    """What packing did.

    Attributes:
        feature_dim: Features of an instance.
        layouts: Files by the program that wrote them.
        notes: What was assumed, with the number of files.
    """

    feature_dim: int
    layouts: Mapping[str, int]
    notes: Mapping[str, int]

    def lines(self) -> list[str]:
        """The closing words."""
        kinds = ", ".join(f"{count} of {layout}" for layout, count in sorted(self.layouts.items()))
        size = f"{self.n_instances} instances of {self.feature_dim} features"
        lines = [f"{self.path}: {self.n_bags} bags, {size}; files: {kinds}"]
        if self.left_out:
            lines.append(f"left out: {len(self.left_out)} bags ({self.path / PROBLEMS_FILE})")
        lines += self.remarks()
        return [*lines, *(f"note: {note} ({count} files)" for note, count in self.notes.items())]


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
    found = dict(zip(manifest.files, map_in_threads(_header, manifest.files, workers), strict=True))
    headers = {bag.bag_id: header for bag, header in found.items() if isinstance(header, FeatureHeader)}
    unreadable = [header for header in found.values() if isinstance(header, LeftOut)]
    if not headers:
        raise InputError(f"{manifest.path}: no feature file can be used; {unreadable[-1].problem}")
    feature_dim = _one_dimension(manifest.files, headers)
    usable = {bag.bag_id: bag for bag in manifest.files if bag.bag_id in headers}
    splits = SplitPlan(manifest, fractions, seed)
    packed = pack_cohort(
        out,
        feature_cohort_info(
            _tile_size(usable.values(), coords),
            feature_dim,
            sorted({header.extractor for header in headers.values()} - {""}),
            labelled=manifest.labelled,
            settings=splits.settings(),
        ),
        manifest.bags,
        usable,
        finished=partial(_finished, out=out, coords=coords),
        pack=partial(_pack, out=out, coords=coords),
        workers=workers,
        splits=splits,
        left_out=(*manifest.left_out, *unreadable),
        progress=progress,
    )
    of_layout: Counter[str] = Counter(
        headers[bag_id].layout for bag_id, result in packed.results.items() if result.n_instances
    )
    notes = Counter(note for result in packed.results.values() for note in result.notes)
    return FeatureSummary(**vars(packed.summary), feature_dim=feature_dim, layouts=of_layout, notes=notes)


def feature_cohort_info(
    tile_size: TilePixels,
    feature_dim: int,
    extractors: Sequence[str],
    *,
    labelled: bool,
    has_instance_labels: bool = False,
    settings: Mapping[str, object] | None = None,
) -> CohortInfo:
    """What `cohort.json` of a cohort of features holds; `extractors` are what made the features."""
    return CohortInfo(
        tile_size=tile_size,
        encoding="features",
        kind="features",
        feature_dim=feature_dim,
        has_instance_labels=has_instance_labels,
        labelled=labelled,
        settings={"source": SOURCE, "feature_dim": feature_dim, EXTRACTORS: list(extractors), **(settings or {})},
    )


def _header(bag: FeatureBag) -> FeatureHeader | LeftOut:
    try:
        return read_header(bag.file)
    except FeatureProblem as problem:
        return _left_out(bag, problem)


def _left_out(bag: FeatureBag, problem: InputError) -> LeftOut:
    file = far.address_of(bag.file)
    return LeftOut(bag.bag_id, file, bag.row, str(problem).removeprefix(f"{file}: "))


def _one_dimension(bags: Sequence[FeatureBag], headers: Mapping[str, FeatureHeader]) -> int:
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


def _tile_size(bags: Iterable[FeatureBag], coords: Path | None) -> TilePixels:
    """Pixels of the tiles as the encoder saw them, of the first file that can be read."""
    problems = []
    for bag in bags:
        try:
            return read_foreign_features(bag.file, coords=coords).tile_size
        except FeatureProblem as problem:
            problems.append(problem)
    raise InputError(f"no feature file can be used; {problems[0]}")


def _finished(bag: FeatureBag, *, out: Path, coords: Path | None) -> BagResult | None:
    """What is packed already, from the same file."""
    try:
        made_from = _fingerprint(bag, coords, *_slide_facts(bag))
    except FeatureProblem:
        return None
    tiles = whole_tile_file(out, bag.bag_id, made_from)
    return None if tiles is None else BagResult(len(tiles), notes=tuple(json.loads(tiles.attributes["notes"])))


def _pack(bag: FeatureBag, *, out: Path, coords: Path | None) -> BagResult:
    try:
        made_from = _fingerprint(bag, coords, *_slide_facts(bag))
        found = placed_features(bag, coords)
    except FeatureProblem as problem:
        return BagResult(left_out=(_left_out(bag, problem),))
    write_feature_tiles(
        path_to_write(out, bag.bag_id),
        found.features,
        found.coords,
        [f"{x}_{y}" for x, y in found.coords.tolist()],
        bag_id=bag.bag_id,
        tile_size=found.tile_size,
        tile_size_level0=found.tile_size_level0,
        mpp=tile_mpp(found.mpp_level0, found.tile_size, found.tile_size_level0),
        source=far.address_of(far.absolute(bag.slide or bag.file)),
        attributes={
            **({} if found.magnification is None else {"magnification": found.magnification}),
            **({} if found.overlap is None else {"overlap": found.overlap}),
            FINGERPRINT: made_from,
            "mpp_level0": found.mpp_level0,
            "feature_file": far.address_of(far.absolute(bag.file)),
            "layout": found.layout,
            "extractor": found.extractor,
            "notes": json.dumps(found.notes),
        },
    )
    return BagResult(len(found.features), notes=found.notes)


def placed_features(bag: FeatureBag, coords: Path | None) -> PlacedFeatures:
    """The features of a bag with their places on its slide.

    Raises:
        FeatureProblem: They cannot be used.
    """
    mpp, size = _slide_facts(bag)
    found = read_foreign_features(bag.file, mpp=mpp, coords=coords)
    _check_inside(found, size)
    return found


def _slide_facts(bag: FeatureBag) -> tuple[MicronsPerPixel | None, Level0Size | None]:
    """Microns per pixel of level 0 by the table or the slide, and the slide's size; None where unknown."""
    if bag.slide is None or far.is_far(bag.slide):  # no slide is fetched only to learn its scale and size
        return bag.mpp, None
    try:
        with open_slide(bag.slide) as slide:
            size = slide_size(slide)
            said = believable(slide.mpp)
    except SlideProblem as problem:
        raise FeatureProblem(f"its slide {bag.slide} cannot be read: {problem}") from problem
    if bag.mpp is not None or said is None:
        return bag.mpp, size
    return said[0], size  # as STAMP does


def _check_inside(found: PlacedFeatures, size: Level0Size | None) -> None:
    if size is None:
        return
    corner = found.coords.max(axis=0)
    if (corner >= np.array(size)).any() or (found.coords < -found.tile_size_level0).any():
        raise FeatureProblem(
            f"its tiles reach to {tuple(corner.tolist())}, but its slide has {size[0]} x {size[1]} px: "
            "it is another slide, or its scale (mpp) is wrong"
        )


def _fingerprint(bag: FeatureBag, coords: Path | None, mpp: MicronsPerPixel | None, size: Level0Size | None) -> str:
    """Changes when the feature file changes, or what the table or the slide says of it."""
    return fingerprint(str(bag.file), *file_stamp(bag.file), str(bag.slide), str(coords), mpp, size)

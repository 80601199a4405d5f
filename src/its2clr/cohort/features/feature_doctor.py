"""Examine a manifest of feature files before they are packed: every file opens, one encoder, scales, groups."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from its2clr import far
from its2clr.cohort.features.feature_cohort import placed_features
from its2clr.cohort.features.feature_manifest import FeatureBag, read_feature_manifest
from its2clr.cohort.features.layouts import PlacedFeatures
from its2clr.cohort.features.tile_grids import FeatureProblem
from its2clr.cohort.findings import Finding, judge_sizes, judge_table
from its2clr.cohort.parallel import map_in_threads
from its2clr.cohort.tables import at_row
from its2clr.errors import InputError


def examine_features(
    path: Path,
    features: Path,
    *,
    labelled: bool = True,
    positive: Sequence[str] = (),
    slides_root: Path | None = None,
    workers: int | None = None,
) -> Iterator[Finding]:
    """Everything that is wrong or worth knowing about a manifest of feature files.

    Args:
        path: The table.
        features: Folder of the files.
        labelled: Whether bags have labels.
        positive: Labels in words that mean 1.
        slides_root: Where relative slides lie.
        workers: Threads; the processors at hand if None.
    """
    try:
        manifest = read_feature_manifest(path, features, labelled=labelled, positive=positive, slides_root=slides_root)
    except InputError as error:
        yield Finding("error", str(path), str(error).removeprefix(f"{path}: "))
        return
    for one in manifest.left_out:
        yield Finding("warning", at_row(path, one.row), f"bag {one.bag_id!r}: {one.problem}; will be left out")
    found: dict[str, tuple[str, int, int, tuple[str, ...]]] = {}
    for bag, read in zip(manifest.files, map_in_threads(_read, manifest.files, workers), strict=True):
        if isinstance(read, str):
            yield Finding("warning", at_row(path, bag.row), f"{far.address_of(bag.file)}: {read}; will be left out")
        else:
            found[bag.bag_id] = read
    dims = Counter(dim for _, dim, _, _ in found.values())
    if len(dims) > 1:
        listed = ", ".join(f"{dim} in {count} files" for dim, count in sorted(dims.items()))
        yield Finding("error", str(path), f"the files hold different numbers of features: {listed}; give one encoder's")
    for (layout, dim), count in sorted(Counter((layout, dim) for layout, dim, _, _ in found.values()).items()):
        yield Finding("note", str(path), f"{count} files of {layout}, {dim} features per instance")
    for note, count in Counter(note for *_, notes in found.values() for note in notes).items():
        yield Finding("note", str(path), f"{note} ({count} files)")
    if found:
        counts = manifest.bags["bag_id"].map({bag_id: read[2] for bag_id, read in found.items()}).dropna()
        yield from judge_sizes(counts.rename("n_instances").to_frame(), path)
    yield from judge_table(manifest)


def _read(bag: FeatureBag) -> tuple[str, int, int, tuple[str, ...]] | str:
    """Layout, features per instance, instances and notes of a file; or why it cannot be used."""
    try:
        read: PlacedFeatures = placed_features(bag, None)
    except FeatureProblem as problem:
        return str(problem).removeprefix(f"{far.address_of(bag.file)}: ")
    return read.layout, read.features.shape[1], len(read.features), read.notes

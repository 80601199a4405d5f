"""New slides, images or features as a cohort without labels, cut as the model's training cohort was."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd

from its2clr.cohort import LeftOut, Manifest, pack_images
from its2clr.cohort.features.feature_cohort import pack_features
from its2clr.cohort.features.feature_manifest import FeatureBag, FeatureManifest
from its2clr.cohort.features.layouts import read_header
from its2clr.cohort.layout import PROBLEMS_FILE
from its2clr.cohort.manifest import BagTable
from its2clr.cohort.packing import NoBagLeftError
from its2clr.cohort.parallel import default_workers
from its2clr.cohort.slides import Slide, SlideManifest, SlideProblem, open_named_slide, pack_slides
from its2clr.cohort.slides.slide_image import believable, check_mpp
from its2clr.cohort.tables import UNKNOWN_LABEL, read_table
from its2clr.errors import InputError
from its2clr.predict.inputs import ImageFolder, Inputs, sort_inputs
from its2clr.predict.tiling import Kind, Tiling
from its2clr.units import MicronsPerPixel

if TYPE_CHECKING:  # packing needs no torch
    from its2clr.engine.devices import Engine


class Packed(NamedTuple):
    """The new cohort.

    Attributes:
        any_bag: Whether any bag could be packed.
        left_out: Slides, images and bags that are not in it, and why.
        notes: What a person should know about the bags that are.
    """

    any_bag: bool
    left_out: list[LeftOut]
    notes: list[str]


def pack_inputs(
    inputs: Inputs,
    out: Path,
    tiling: Tiling,
    engine: "Engine",
    default_mpp: MicronsPerPixel | None,
    workers: int | None,
) -> Packed:
    """Make a cohort of the slides, the image folders or the feature files; finished bags are not packed again.

    Args:
        inputs: What to pack.
        out: The cohort folder.
        tiling: How the model's training cohort was cut.
        engine: Shows progress.
        default_mpp: Microns per pixel of slides where neither file nor manifest says.
        workers: Processes (slides) or threads (images); all cores if None.

    Raises:
        InputError: If the folder holds something else.
    """
    if default_mpp is not None:
        check_mpp(default_mpp, "default_mpp")
    try:
        if inputs.slides:
            notes = _pack_slides(inputs.slides, out, tiling, engine, default_mpp, workers)
        elif inputs.folders:
            notes = _pack_folders(inputs.folders, out, tiling, engine, workers)
        elif inputs.features:
            notes = _pack_features(inputs.features, out, engine, default_mpp, workers)
        else:
            return Packed(any_bag=False, left_out=[], notes=[])
    except NoBagLeftError:
        return Packed(any_bag=False, left_out=_problems(out), notes=[])
    return Packed(any_bag=True, left_out=_problems(out), notes=notes)


def _pack_slides(
    slides: Sequence[Slide],
    out: Path,
    tiling: Tiling,
    engine: "Engine",
    default_mpp: MicronsPerPixel | None,
    workers: int | None,
) -> list[str]:
    if default_mpp is not None:
        slides = [_with_scale(slide, default_mpp) for slide in slides]
    with engine.progress("tile", len(slides), "slides") as progress:
        summary = pack_slides(
            _slide_manifest(slides),
            out,
            tiling.slide_settings(),
            workers=min(workers or default_workers(), len(slides)),
            progress=progress.reach_with("tiles"),
        )
    return [f"{bag_id}: {note}" for bag_id, note in summary.notes]


def _with_scale(slide: Slide, default_mpp: MicronsPerPixel) -> Slide:
    """The slide, with this scale if neither its file nor the manifest says one.

    It is not a setting of the cohort: a change would then tile every slide again, also those that say their scale.
    """
    try:
        with open_named_slide(slide.file) as image:
            said = believable(image.mpp)
    except SlideProblem:  # reported when it is tiled
        return slide
    return slide if said is not None or slide.mpp is not None else replace(slide, mpp=default_mpp)


def _pack_folders(
    folders: Sequence[ImageFolder], out: Path, tiling: Tiling, engine: "Engine", workers: int | None
) -> list[str]:
    bags = _image_manifest(folders)
    with engine.progress("pack", len(folders), "bags") as progress:
        pack_images(bags, out, **tiling.image_settings(), workers=workers, progress=progress.reach)
    return []


def _pack_features(
    bags: Sequence[FeatureBag], out: Path, engine: "Engine", default_mpp: MicronsPerPixel | None, workers: int | None
) -> list[str]:
    if default_mpp is not None:  # only coordinates of STAMP need a scale, which its files do not hold
        stamp = {bag.bag_id for bag in bags if bag.mpp is None and read_header(bag.file).layout == "STAMP"}
        bags = [replace(bag, mpp=default_mpp) if bag.bag_id in stamp else bag for bag in bags]
    manifest = _feature_manifest(bags)
    with engine.progress("pack", len(bags), "bags") as progress:
        summary = pack_features(manifest, out, workers=workers, progress=progress.reach)
    return [f"{note} ({count} files)" for note, count in summary.notes.items()]


def slides_of_folder(folder: Path) -> SlideManifest:
    """All slides in a folder and below it, as bags without labels.

    Raises:
        InputError: There are none.
    """
    return _slide_manifest(_found(folder, "slides").slides)


def images_of_folder(folder: Path) -> Manifest:
    """A folder of images, or of such folders, as bags without labels.

    Raises:
        InputError: There are none.
    """
    return _image_manifest(_found(folder, "images").folders)


def features_of_folder(folder: Path) -> FeatureManifest:
    """All feature files in a folder and below it, as bags without labels; what cannot be read is left out.

    Raises:
        InputError: There are none.
    """
    found = _found(folder, "features")
    return replace(_feature_manifest(found.features), left_out=tuple(found.left_out))


def _found(folder: Path, kind: Kind) -> Inputs:
    found = sort_inputs([folder], kind)
    if found.cohorts:
        raise InputError(f"{folder}: is a cohort already")
    if not (found.slides or found.folders or found.features):
        raise InputError(f"{folder}: {found.left_out[0].problem if found.left_out else 'is empty'}")
    return found


def _slide_manifest(slides: Sequence[Slide]) -> SlideManifest:
    return SlideManifest(**vars(_table(slides)), slides=tuple(slides))


def _image_manifest(folders: Sequence[ImageFolder]) -> Manifest:
    members = [
        (one.bag_id, str(file), name, UNKNOWN_LABEL)
        for one in folders
        for file, name in zip(one.files, one.names, strict=True)
    ]
    rows = [one.row for one in folders for _ in one.files]
    instances = pd.DataFrame(members, columns=["bag_id", "file", "name", "label"], index=rows)
    return Manifest(**vars(_table(folders)), instances=instances)


def _feature_manifest(bags: Sequence[FeatureBag]) -> FeatureManifest:
    return FeatureManifest(**vars(_table(bags)), files=tuple(bags))


def _table(bags: Sequence[Slide | ImageFolder | FeatureBag]) -> BagTable:
    """Bags to be predicted: without labels, all in test, each in a group of its own."""
    names = [bag.bag_id for bag in bags]
    table = pd.DataFrame({"bag_id": names, "split": "test", "group": names}, index=[bag.row for bag in bags])
    return BagTable(Path(), table, has_splits=True, labelled=False)


def _problems(cohort: Path) -> list[LeftOut]:
    table = read_table(cohort / PROBLEMS_FILE, [])
    if table is None:
        return []
    columns = (table[name].tolist() for name in ("bag_id", "file", "row", "problem"))
    return [LeftOut(bag_id, file, int(row), problem) for bag_id, file, row, problem in zip(*columns, strict=True)]

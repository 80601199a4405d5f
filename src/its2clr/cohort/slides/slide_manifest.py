"""Read the table of slides: `bag_id,file,label[,patient,split,mpp,annotation]`, one row per slide."""

import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from its2clr import far
from its2clr.cohort.layout import LeftOut
from its2clr.cohort.manifest import BagTable, check_bags
from its2clr.cohort.slides.slide_files import find_slides
from its2clr.cohort.slides.slide_image import LARGEST_MPP, SMALLEST_MPP, is_possible
from its2clr.cohort.tables import UNKNOWN_LABEL, Problem, at_row, column_cells, raise_problems, read_columns
from its2clr.errors import InputError
from its2clr.files import is_there
from its2clr.units import MicronsPerPixel

_OWN_COLUMNS = ("file", "mpp", "annotation", "n_instances", "path")
_ADVICE = {
    "label": "name another column with --label, or pack slides without labels with --unlabelled",
}


@dataclass(frozen=True)
class Slide:
    """One slide to be tiled: one bag.

    Attributes:
        bag_id: The bag.
        row: The row of the manifest.
        file: The slide, absolute or an address.
        name: The slide as written in the manifest.
        mpp: Microns per pixel of level 0 as the manifest says, for files that do not.
        annotation: File of the annotated regions.
        unannotated: Ground truth of the tiles of a slide without annotation: 0 in a negative bag, else unknown;
            None if no slide is annotated, and so no tile has ground truth.
    """

    bag_id: str
    row: int
    file: Path
    name: str
    mpp: MicronsPerPixel | None = None
    annotation: Path | None = None
    unannotated: int | None = None


@dataclass(frozen=True, eq=False)
class SlideManifest(BagTable):
    """Slides and their labels, checked.

    Attributes:
        slides: One per bag, in order.
        label: The column the labels are from.
        left_out: Slides without a label in that column.
    """

    slides: tuple[Slide, ...]
    label: str = "label"
    left_out: tuple[LeftOut, ...] = ()

    @property
    def annotated(self) -> bool:
        """Whether any slide has an annotation."""
        return any(slide.annotation is not None for slide in self.slides)


def read_slide_manifest(
    path: Path,
    *,
    label: str | None = None,
    slides_root: Path | None = None,
    annotations_root: Path | None = None,
    labelled: bool = True,
    positive: Collection[str] = (),
    annotation_scale: bool = False,
) -> SlideManifest:
    """Read and check a manifest of slides.

    Args:
        path: The table.
        label: The column of the labels, of several; slides whose cell is empty there are left out. By default
            column `label`, in which every cell must be filled.
        slides_root: Where relative files lie; the table's own folder if not given.
        annotations_root: Where relative annotations lie; the table's own folder if not given.
        labelled: Whether bags have labels. If not, labels and splits are ignored, and every bag is in test.
        positive: Labels in words that mean 1, all others mean 0; none: labels are 0 and 1.
        annotation_scale: Whether a slide whose scale neither its file nor the table says has the one that its
            annotation says (`MicronsPerPixel` of ImageScope).

    Raises:
        InputError: With all problems of the manifest, each with file and row.
    """
    path = Path(path)
    problems: list[Problem] = []
    column = label or "label"
    table = read_columns(path, ["bag_id", *([column] if labelled else [])], _ADVICE)
    if "file" not in table.columns:
        table = table.assign(file=_files_by_name(table, path, slides_root or path.parent, problems))
    if table.empty:
        raise InputError(f"{path}: there are no slides below the header")
    table, left_out = _choose_label(table, column, labelled=labelled, may_be_empty=label is not None)
    if table.empty:
        raise InputError(f"{path}: no slide has a label in column {column!r}")
    bags = check_bags(table, path, problems, labelled=labelled, positive=positive)
    slides = _list_slides(
        table.assign(label=bags.bags["label"]) if labelled else table,
        path,
        slides_root or path.parent,
        annotations_root or path.parent,
        problems,
    )
    raise_problems(problems)
    if annotation_scale:
        slides = tuple(map(_with_annotated_scale, slides))
    return SlideManifest(**vars(bags.without(_OWN_COLUMNS)), slides=slides, label=column, left_out=left_out)


def _files_by_name(table: pd.DataFrame, path: Path, folder: Path, problems: list[Problem]) -> list[str]:
    """The slide of each row, where no column names it: the one in a folder that is called as the bag is."""
    found: dict[str, list[Path]] = {}
    for file in find_slides(far.absolute(folder)) if far.is_folder(folder) else ():
        for name in {file.stem, file.name}:
            found.setdefault(name, []).append(file)
    files = []
    for row, bag_id in column_cells(table, "bag_id"):
        own = found.get(bag_id, [])
        if len(own) > 1:
            several = " and ".join(str(file) for file in own[:2])
            problems.append(Problem(at_row(path, row), f"bag {bag_id!r} could be {several}; add a column 'file'"))
        files.append(str(own[0]) if own else f"{bag_id}.*")
    if not any(bag_id in found for bag_id in table["bag_id"]):
        message = f"column 'file' is missing, and no slide in {folder} is called as a bag; name their folder"
        raise InputError(f"{at_row(path, 1)}: {message} with --slides-root, or add the column")
    return files


def _with_annotated_scale(slide: Slide) -> Slide:
    from its2clr.cohort.slides.annotations import read_shapes

    if slide.mpp is not None or slide.annotation is None:
        return slide
    try:
        said = read_shapes(slide.annotation).mpp
    except InputError:  # tiling says why
        return slide
    return replace(slide, mpp=MicronsPerPixel(said)) if said is not None and is_possible(said) else slide


def _choose_label(
    table: pd.DataFrame, column: str, *, labelled: bool, may_be_empty: bool
) -> tuple[pd.DataFrame, tuple[LeftOut, ...]]:
    """Make the chosen column the label; other label columns stay as they are."""
    if not labelled:
        return table.drop(columns=["label", "split"], errors="ignore"), ()
    if column != "label":
        table = table.drop(columns="label", errors="ignore").rename(columns={column: "label"})
    if not may_be_empty:
        return table, ()
    empty = table["label"] == ""
    left_out = tuple(
        LeftOut(bag_id, name, row, f"has no label in column {column!r}")
        for (row, bag_id), name in zip(column_cells(table[empty], "bag_id"), table.loc[empty, "file"], strict=True)
    )
    return table[~empty], left_out


def _list_slides(
    table: pd.DataFrame, path: Path, slides_root: Path, annotations_root: Path, problems: list[Problem]
) -> tuple[Slide, ...]:
    scales = parse_scales(table, path, problems)
    annotations = table["annotation"].tolist() if "annotation" in table.columns else [""] * len(table)
    labels = table["label"].tolist() if "label" in table.columns else [UNKNOWN_LABEL] * len(table)
    bag_ids, names = table["bag_id"].tolist(), table["file"].tolist()
    annotated = any(annotations)
    slides = []
    first: dict[str, int] = {}
    for row, bag_id, name, annotation, label in zip(
        table.index.tolist(), bag_ids, names, annotations, labels, strict=True
    ):
        if not name:
            problems.append(Problem(at_row(path, row), "file is empty, expected a slide"))
        elif (known := first.setdefault(os.path.normpath(name), row)) != row:
            problems.append(Problem(at_row(path, row), f"file {name!r} is already the slide of row {known}"))
        if annotation and far.is_far(far.below(annotations_root, annotation)):
            message = f"annotation {annotation!r}: annotations are read from this machine; copy them, and name their"
            problems.append(Problem(at_row(path, row), f"{message} folder with --annotations-root"))
        slides.append(
            Slide(
                bag_id=bag_id,
                row=row,
                file=far.below(slides_root, name),
                name=name,
                mpp=scales.get(row),
                annotation=far.below(annotations_root, annotation) if annotation else None,
                unannotated=(0 if label == 0 else UNKNOWN_LABEL) if annotated else None,
            )
        )
    # single missing slides are left out when tiling; if there are none at all, the folder is wrong
    if slides and all(names) and not any(far.is_far(slide.file) or is_there(slide.file) for slide in slides):
        message = f"none of the files exist, the first would be {slides[0].file}; is the folder of slides right?"
        problems.append(Problem(at_row(path, slides[0].row), message))
    return tuple(slides)


def parse_scales(table: pd.DataFrame, path: Path, problems: list[Problem]) -> dict[int, MicronsPerPixel]:
    """Read column `mpp`, the scale of level 0, where it is there and filled; wrong cells are noted.

    Returns:
        The scales by row.
    """
    scales = {}
    for row, cell in column_cells(table, "mpp") if "mpp" in table.columns else ():
        try:
            mpp = float(cell or "nan")
        except ValueError:
            mpp = 0.0
        if is_possible(mpp):
            scales[row] = MicronsPerPixel(mpp)
        elif cell:
            expected = f"expected um/px of level 0 from {SMALLEST_MPP:g} to {LARGEST_MPP:g}, or nothing"
            problems.append(Problem(at_row(path, row), f"mpp is {cell!r}, {expected}"))
    return scales

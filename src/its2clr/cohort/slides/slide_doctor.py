"""Examine a manifest of slides before they are tiled: files, scales, annotations and their classes, groups."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from its2clr.cohort.findings import Finding, SlideQuestions, judge_table
from its2clr.cohort.parallel import map_in_threads
from its2clr.cohort.slides.annotations import read_shapes
from its2clr.cohort.slides.classes import check_chosen_classes
from its2clr.cohort.slides.ground_truth import share_outside
from its2clr.cohort.slides.shapes import Shapes, union
from its2clr.cohort.slides.slide_image import SlideImage, SlideProblem, believable, open_named_slide, slide_mpp
from its2clr.cohort.slides.slide_manifest import Slide, read_slide_manifest
from its2clr.cohort.tables import at_row
from its2clr.errors import InputError

_UNLIKE = 0.05
_MOST_OUTSIDE = 0.01


def examine_slides(
    path: Path,
    asked: SlideQuestions,
    *,
    labelled: bool = True,
    positive: Sequence[str] = (),
    workers: int | None = None,
) -> Iterator[Finding]:
    """Everything that is wrong or worth knowing about a manifest of slides.

    Args:
        path: The table.
        asked: How the slides are going to be tiled.
        labelled: Whether they have labels.
        positive: Labels in words that mean 1.
        workers: Threads; the processors at hand if None.
    """
    try:
        manifest = read_slide_manifest(
            path,
            label=asked.label,
            slides_root=asked.slides_root,
            annotations_root=asked.annotations_root,
            labelled=labelled,
            positive=positive,
            annotation_scale=asked.annotation_scale,
        )
    except InputError as error:
        yield Finding("error", str(path), str(error).removeprefix(f"{path}: "))
        return
    for one in manifest.left_out:
        yield Finding("warning", at_row(path, one.row), f"bag {one.bag_id!r}: {one.problem}; will be left out")
    inspect = partial(_inspect, path=path, asked=asked)
    regions: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for findings, shapes in map_in_threads(inspect, manifest.slides, workers):
        yield from findings
        for shape in [] if shapes is None else shapes.named:
            regions[shape.shown] += shape.regions
        files.update({shape.shown for shape in shapes.named} if shapes is not None else ())
    try:
        check_chosen_classes((slide.annotation for slide in manifest.slides), asked.classes, workers)
    except InputError as error:
        yield Finding("error", str(path), str(error))
    for name in sorted(regions):
        yield Finding("note", str(path), f"annotated class {name}: {regions[name]} regions on {files[name]} slides")
    yield from judge_table(manifest)


def _inspect(slide: Slide, path: Path, asked: SlideQuestions) -> tuple[list[Finding], Shapes | None]:
    where, findings, shapes = at_row(path, slide.row), [], None
    if slide.annotation is not None:
        try:
            shapes = read_shapes(slide.annotation)
        except InputError as error:
            findings.append(Finding("warning", where, f"its annotation cannot be used: {error}; will be left out"))
    try:
        with open_named_slide(slide.file) as image:
            findings += _judge(slide, image, shapes, where, asked)
    except SlideProblem as problem:
        findings.append(Finding("warning", where, f"{slide.file}: {problem}; will be left out"))
    return findings, shapes


def _judge(
    slide: Slide, image: SlideImage, shapes: Shapes | None, where: str, asked: SlideQuestions
) -> Iterator[Finding]:
    """Scale and annotation of a slide that opens."""
    said, annotated = believable(image.mpp), None if shapes is None else shapes.mpp
    try:
        mpp = slide_mpp(image.mpp, slide.mpp, asked.default_mpp)
    except SlideProblem as problem:
        hint = "" if annotated is None else f" (its annotation says {annotated:g} um/px, which --annotation-mpp takes)"
        yield Finding("warning", where, f"{slide.file}: {problem}{hint}; will be left out")
    else:
        if said is None:
            yield Finding("note", where, f"the file does not say its scale; {mpp:g} um/px is used")
        if annotated is not None and abs(annotated - mpp) > _UNLIKE * mpp:
            message = f"its annotation was made at {annotated:g} um/px, the slide has {mpp:g}: is it of this slide?"
            yield Finding("warning", where, message)
    if shapes is not None and not shapes.is_mask:
        outside = share_outside(union(shape.area for shape in shapes.named), image.levels[0])
        if outside > _MOST_OUTSIDE:
            yield Finding("warning", where, f"{outside:.0%} of what is annotated lies outside the slide")

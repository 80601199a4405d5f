"""What the doctor finds, and what it says of any table of bags."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from its2clr.cohort.manifest import BagTable
from its2clr.cohort.packing import TOO_FEW
from its2clr.cohort.splits import SPLITS
from its2clr.cohort.tables import Problem
from its2clr.units import MicronsPerPixel

Level = Literal["error", "warning", "note"]

NO_LABELS = "bags have no labels: they can be predicted, not trained with or evaluated"
_FEW_VALIDATION_BAGS = 10
_UNEQUAL_BAGS = 20


@dataclass(frozen=True)
class Finding:
    """One thing found.

    Attributes:
        level: "error" must be repaired, "warning" should be looked at, "note" is for information.
        where: The file or folder, with row or image.
        message: What was found, and what to do.
    """

    level: Level
    where: str
    message: str


@dataclass(frozen=True)
class SlideQuestions:
    """How the slides of a manifest are going to be tiled, as far as it can fail.

    Attributes:
        label: Column of the labels, of several.
        slides_root: Where relative files lie.
        annotations_root: Where relative annotations lie.
        default_mpp: Scale where neither file nor manifest says.
        annotation_scale: Whether the scale that the annotation says is used.
        classes: Annotated classes that count as tumour.
    """

    label: str | None = None
    slides_root: Path | None = None
    annotations_root: Path | None = None
    default_mpp: MicronsPerPixel | None = None
    annotation_scale: bool = False
    classes: tuple[str, ...] = ()


def errors_of(problems: Iterable[Problem]) -> list[Finding]:
    """Problems of tables, as findings."""
    return [Finding("error", problem.where, problem.message) for problem in problems]


def judge_table(table: BagTable) -> Iterator[Finding]:
    """What there is to say of the bags of a manifest: classes, groups, splits, and whether they are enough."""
    if not table.labelled:
        yield Finding("note", str(table.path), NO_LABELS)
    elif table.too_few:
        yield Finding("note", str(table.path), TOO_FEW)
    elif table.has_splits:
        yield from judge_validation(table.bags, table.path)
    else:
        yield Finding("note", str(table.path), "no splits are given; they will be assigned when packing")
    yield from count_bags(table.bags, table.path, has_groups=table.has_groups)


def judge_validation(bags: pd.DataFrame, where: Path) -> Iterator[Finding]:
    """Whether there are enough validation bags to choose a model on."""
    for label in (0, 1):
        count = int(((bags["split"] == "val") & (bags["label"] == label)).sum())
        if 0 < count < _FEW_VALIDATION_BAGS:
            message = f"val has only {count} bags with label {label}; with so few, choosing a model on them is chance"
            yield Finding("warning", str(where), message)


def judge_sizes(bags: pd.DataFrame, where: Path) -> Iterator[Finding]:
    """Whether bags are very unequal."""
    sizes = bags["n_instances"].to_numpy(dtype=np.int64)
    median = float(np.median(sizes))
    if sizes.max() > _UNEQUAL_BAGS * median or median > _UNEQUAL_BAGS * sizes.min():
        message = f"bags are very unequal: {sizes.min()} to {sizes.max()} instances, median {median:g}"
        yield Finding("warning", str(where), message)


def count_bags(bags: pd.DataFrame, where: Path, *, has_groups: bool | None = None) -> Iterator[Finding]:
    """How many bags each split and class has, and whether it is known which belong together.

    Args:
        bags: The bags; `n_instances` may be missing.
        where: Their table or folder.
        has_groups: Whether the table says which bags belong together; None of a cohort, which does not tell.
    """
    alone = "label" in bags.columns and (bags["group"] == bags["bag_id"]).all()
    if alone and not has_groups:
        message = "no groups are given, so every bag" if has_groups is False else "every bag"
        message += " counts as its own patient; if a patient has several, splits leak"
        yield Finding("warning", str(where), f"{message}: add a column 'group' or 'patient'")
    for name in [*SPLITS, ""]:
        rows = bags[bags["split"] == name]
        if rows.empty:
            continue
        message = f"{len(rows)} bags"
        if "label" in rows.columns:
            by_label = Counter(rows["label"].tolist())
            message += f" ({by_label[1]} positive, {by_label[0]} negative)"
        message += f", {rows['n_instances'].sum()} instances" if "n_instances" in rows.columns else ""
        message += f", {rows['group'].nunique()} groups"
        yield Finding("note", str(where), f"{name}: {message}" if name else message)

"""Make another cohort from one whose instances are known: other witness rates, or bags of about one size.

What is kept of each bag, see `subsets`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from its2clr.cohort.cohort import Cohort
from its2clr.cohort.identity import hash_of
from its2clr.cohort.layout import BAGS_FILE, CohortInfo, tile_path
from its2clr.cohort.packing import BagResult, pack_cohort, path_to_write
from its2clr.cohort.parallel import Progress
from its2clr.cohort.splits import SPLITS
from its2clr.cohort.subsets import (
    Indices,
    Labels,
    check_share,
    contradictions,
    resample_witness_rate,
    split_into_sub_bags,
    witness_rate,
)
from its2clr.cohort.tables import Problem, check_bag_ids, raise_problems
from its2clr.cohort.tiles import write_tile_file
from its2clr.errors import InputError
from its2clr.seeds import derive_seed

SOURCE = "resampled"

_SPREADSHEET_START = 2  # the header is row 1


@dataclass(frozen=True)
class ResampleSummary:
    """What resampling reached.

    Attributes:
        witness_rate_before: Share of positives in the positive bags of the resampled splits.
        witness_rate_after: The same in the new cohort.
        bags: Bags of the new cohort, of all splits.
        instances: Instances of the new cohort, of all splits.
    """

    witness_rate_before: float
    witness_rate_after: float
    bags: int
    instances: int


class _Piece(NamedTuple):
    """A bag of the new cohort: its identifier, and which instances of the original bag it holds."""

    bag_id: str
    members: Indices


class _Plan(NamedTuple):
    """What becomes of one bag of the original cohort."""

    bag_id: str
    pieces: list[_Piece]


def resample_cohort(
    cohort: Cohort,
    out: str | Path,
    *,
    keep_negatives: float = 1.0,
    keep_positives: float = 1.0,
    negative_bags: bool = False,
    sub_bag_size: int | None = None,
    seed: int = 0,
    splits: Sequence[str] = SPLITS,
    workers: int | None = None,
    progress: Progress | None = None,
) -> ResampleSummary:
    """Write a cohort with other witness rates, sub-bags, or both (in this order); the same again does nothing.

    Images are copied as they are encoded. A bag keeps its label, split, group and additional columns; sub-bags
    of bag `a` are `a#1`, `a#2` and so on, in the group of `a`, so they stay in one split.

    Args:
        cohort: The original, with instance ground truth.
        out: Folder of the new cohort; new, empty, or begun with the same settings.
        keep_negatives: Share of the negatives of each positive bag to keep.
        keep_positives: Share of the positives of each positive bag to keep; at least one stays.
        negative_bags: Whether negatives are dropped in negative bags too.
        sub_bag_size: The most instances of a sub-bag; None leaves bags whole.
        seed: Another seed gives another cohort of the same kind.
        splits: The splits to resample; bags of other splits are copied whole.
        workers: Threads; the processors at hand if None.
        progress: Called with the number of original bags done and of all.

    Returns:
        The witness rates before and after, and the size of the new cohort.

    Raises:
        InputError: If a setting is wrong, the instances of a positive bag are not all labelled, labels contradict,
            or the folder holds something else.
    """
    out = Path(out)
    if cohort.kind == "features":
        raise InputError(f"{cohort.path}: holds features; resample the cohort of tiles, then extract features of that")
    check_share("keep_negatives", keep_negatives)
    check_share("keep_positives", keep_positives)
    chosen = _resampled_bags(cohort, splits)
    labels = _ground_truth(cohort, chosen)
    plans = []
    for row, bag_id in enumerate(cohort.bags["bag_id"].tolist()):
        plan = _Plan(bag_id, [_Piece(bag_id, np.arange(len(labels[row])))])
        if chosen[row]:
            kept = resample_witness_rate(
                labels[row],
                cohort.bags["label"].iloc[[row]],
                [0, len(labels[row])],
                keep_negatives=keep_negatives,
                keep_positives=keep_positives,
                negative_bags=negative_bags,
                seed=seed,
                bag_ids=[bag_id],
            )
            plan = _divide(bag_id, kept, labels[row], int(cohort.bags["label"].iloc[row]), sub_bag_size, seed)
        plans.append(plan)
    settings: dict[str, Any] = {
        "source": SOURCE,
        "cohort": cohort.name,
        "fingerprint": hash_of(cohort.identity().digest, cohort.bags.to_csv(index=False))[:16],
        "keep_negatives": float(keep_negatives),
        "keep_positives": float(keep_positives),
        "negative_bags": negative_bags,
        "sub_bag_size": sub_bag_size,
        "seed": seed,
        "splits": [name for name in SPLITS if name in splits],
    }
    original = cohort.info
    packed = pack_cohort(
        out,
        CohortInfo(
            tile_size=original.tile_size, encoding=original.encoding, has_instance_labels=True, settings=settings
        ),
        _new_bags(cohort, plans, out),
        {plan.bag_id: plan for plan in plans},
        finished=partial(_finished, out=out),
        pack=partial(_copy_bag, cohort=cohort, out=out),
        workers=workers,
        progress=progress,
    ).summary
    kept_labels = [of_bag[_all_members(plan)] for of_bag, plan in zip(labels, plans, strict=True)]
    return ResampleSummary(
        witness_rate_before=_rate(cohort.bags, labels, chosen),
        witness_rate_after=_rate(cohort.bags, kept_labels, chosen),
        bags=packed.n_bags,
        instances=packed.n_instances,
    )


def _resampled_bags(cohort: Cohort, splits: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Which bags are of the splits to resample."""
    wrong = [name for name in splits if name not in SPLITS]
    if wrong or not splits or isinstance(splits, str):
        raise InputError(f"splits must be some of {', '.join(SPLITS)}, got {splits!r}")
    if not cohort.labels_visible:
        raise InputError(f"{cohort.path}: labels are out of reach here (cohort without labels); resampling needs them")
    chosen: npt.NDArray[np.bool_] = cohort.bags["split"].isin(list(splits)).to_numpy(dtype=np.bool_)
    if not (cohort.bags["label"].to_numpy()[chosen] == 1).any():
        raise InputError(
            f"{cohort.path}: no positive bag in {', '.join(splits)}, so there is no witness rate to change"
        )
    return chosen


def _ground_truth(cohort: Cohort, chosen: npt.NDArray[np.bool_]) -> list[Labels]:
    """The instance labels of each bag; those to be resampled must be whole and agree with the bag's label."""
    if not cohort.has_instance_labels:
        need = "resampling must know which instances are positive"
        advice = "add a column 'label' to its table of instances and pack it again"
        raise InputError(f"{cohort.path}: this cohort has no instance labels, and {need}; {advice}")
    labels = np.split(cohort.instance_labels(), cohort.offsets()[1:-1])
    rows = zip(cohort.bags["bag_id"].tolist(), cohort.bags["label"].tolist(), labels, chosen, strict=True)
    problems: list[Problem] = []
    for bag_id, label, of_bag, wanted in rows:
        problems += contradictions(f"{cohort.path}, bag {bag_id!r}", label, of_bag) if wanted else []
    raise_problems(problems)
    return labels


def _divide(bag_id: str, kept: Indices, labels: Labels, label: int, size: int | None, seed: int) -> _Plan:
    if size is None:
        return _Plan(bag_id, [_Piece(bag_id, kept)])
    parts = split_into_sub_bags(labels[kept], label, size=size, seed=derive_seed(seed, "sub_bags", bag_id))
    if len(parts) == 1:
        return _Plan(bag_id, [_Piece(bag_id, kept)])
    return _Plan(bag_id, [_Piece(f"{bag_id}#{number}", kept[part]) for number, part in enumerate(parts, start=1)])


def _all_members(plan: _Plan) -> Indices:
    return np.concatenate([piece.members for piece in plan.pieces])


def _new_bags(cohort: Cohort, plans: list[_Plan], out: Path) -> pd.DataFrame:
    """The table of bags of the new cohort: each row repeated for its sub-bags."""
    pieces = [piece for plan in plans for piece in plan.pieces]
    rows = np.repeat(np.arange(len(plans)), [len(plan.pieces) for plan in plans])
    bags = cohort.bags.iloc[rows].assign(
        bag_id=[piece.bag_id for piece in pieces], n_instances=[len(piece.members) for piece in pieces]
    )
    bags.index = pd.RangeIndex(_SPREADSHEET_START, _SPREADSHEET_START + len(bags))
    problems: list[Problem] = []
    check_bag_ids(bags, out / BAGS_FILE, problems)
    if problems:
        raise InputError(f"the sub-bags cannot be named; rename these bags of {cohort.path}: {problems[0].message}")
    return bags


def _rate(bags: pd.DataFrame, labels: list[Labels], chosen: npt.NDArray[np.bool_]) -> float:
    parts = [of_bag for of_bag, wanted in zip(labels, chosen, strict=True) if wanted]
    offsets = np.concatenate([[0], np.cumsum([len(of_bag) for of_bag in parts])])
    return witness_rate(np.concatenate(parts), bags["label"].to_numpy()[chosen], offsets)


def _finished(plan: _Plan, *, out: Path) -> BagResult | None:
    whole = all(tile_path(out, piece.bag_id).exists() for piece in plan.pieces)
    return BagResult(len(_all_members(plan))) if whole else None


def _copy_bag(plan: _Plan, *, cohort: Cohort, out: Path) -> BagResult:
    """Write the tile files of one bag that are not there yet."""
    tiles = cohort.tile_file(plan.bag_id)
    for piece in plan.pieces:
        if tile_path(out, piece.bag_id).exists():
            continue
        write_tile_file(
            path_to_write(out, piece.bag_id),
            [tiles.encoded(number) for number in piece.members.tolist()],
            tiles.coords[piece.members],
            [tiles.names[number] for number in piece.members.tolist()],
            None if tiles.labels is None else tiles.labels[piece.members],
            bag_id=piece.bag_id,
            tile_size=tiles.tile_size,
            tile_size_level0=tiles.tile_size_level0,
            mpp=tiles.mpp,
            source=tiles.source,
            encoding=tiles.encoding,
            attributes={**tiles.attributes, "resampled_from": plan.bag_id},
        )
    return BagResult(len(_all_members(plan)))

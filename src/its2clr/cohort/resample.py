"""Make another cohort from one whose instances are known: other witness rates, or bags of about one size.

Appendix "Experiments on Synthetic Versions of Camelyon16" of the paper. What is kept of a bag depends on the
seed and the bag's identifier only, never on the order of the bags; and with the same seed, keeping fewer
instances keeps some of those that keeping more does, so the versions of a sweep are nested.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from its2clr.cohort.cohort import Cohort
from its2clr.cohort.layout import BAGS_FILE, CohortInfo, claim_folder, tile_path, write_bags, write_problems
from its2clr.cohort.parallel import Progress, map_in_threads
from its2clr.cohort.splits import SPLITS
from its2clr.cohort.table_checks import UNKNOWN_LABEL, check_bag_ids
from its2clr.cohort.tables import Problem, raise_problems
from its2clr.cohort.tiles import write_tile_file
from its2clr.errors import InputError
from its2clr.seeds import derive_seed, numpy_generator

SOURCE = "resampled"
SUB_BAG_SIZE = 500
"""Instances of a sub-bag in the paper."""

_SPREADSHEET_START = 2  # the header is row 1

_Indices = npt.NDArray[np.int64]
_Labels = npt.NDArray[np.int8]


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
    members: _Indices


class _Plan(NamedTuple):
    """What becomes of one bag of the original cohort."""

    bag_id: str
    pieces: list[_Piece]


def witness_rate(labels_per_instance: npt.ArrayLike, bag_labels: npt.ArrayLike, offsets: npt.ArrayLike) -> float:
    """The share of positives among the instances of positive bags, all those bags taken together.

    Args:
        labels_per_instance: (N,) 1 or 0; instances of unknown label (-1) do not count.
        bag_labels: (B,) 1 or 0.
        offsets: (B+1,) where the instances of each bag begin.

    Raises:
        InputError: If no instance of a positive bag is labelled, or the arrays do not fit together.
    """
    labels, of_bags, starts = _as_arrays(labels_per_instance, bag_labels, offsets)
    within = labels[np.repeat(of_bags == 1, np.diff(starts))]
    known = within[within != UNKNOWN_LABEL]
    if not len(known):
        raise InputError("the witness rate is that of positive bags, and here is none with labelled instances")
    return float((known == 1).mean())


def resample_witness_rate(
    labels_per_instance: npt.ArrayLike,
    bag_labels: npt.ArrayLike,
    offsets: npt.ArrayLike,
    *,
    keep_negatives: float = 1.0,
    keep_positives: float = 1.0,
    negative_bags: bool = False,
    seed: int = 0,
    bag_ids: Sequence[str] | None = None,
) -> _Indices:
    """Choose which instances to keep so that the witness rate rises (fewer negatives) or falls (fewer positives).

    The share is kept in each bag; where it is no whole number of instances, it is rounded up or down at random
    so that the mean over bags is right. A positive bag keeps at least one positive, and no bag becomes empty;
    where that binds, the reached rate (`witness_rate` of what is kept) stays above the one aimed at.

    Args:
        labels_per_instance: (N,) 1 or 0; in negative bags -1 (unknown) means 0.
        bag_labels: (B,) 1 or 0.
        offsets: (B+1,) where the instances of each bag begin.
        keep_negatives: Share of the negatives to keep, 0 to 1.
        keep_positives: Share of the positives to keep, 0 to 1.
        negative_bags: Whether negatives are dropped in negative bags too. The paper drops them "in each bag",
            which leaves the size of a bag saying less about its label; by default negative bags stay whole.
        seed: Another seed keeps other instances.
        bag_ids: (B,) what the choice within each bag depends on, besides the seed; their numbers if None.

    Returns:
        Indices of the instances kept, rising.

    Raises:
        InputError: If a share is out of range, the arrays do not fit together, or the labels contradict.
    """
    _check_share("keep_negatives", keep_negatives)
    _check_share("keep_positives", keep_positives)
    labels, of_bags, starts = _as_arrays(labels_per_instance, bag_labels, offsets)
    names = [str(number) for number in range(len(of_bags))] if bag_ids is None else list(bag_ids)
    if len(names) != len(of_bags):
        raise InputError(f"got {len(names)} bag_ids for {len(of_bags)} bag labels")
    problems: list[Problem] = []
    kept = [np.empty(0, dtype=np.int64)]
    for name, label, start, end in zip(names, of_bags.tolist(), starts[:-1], starts[1:], strict=True):
        bag = labels[start:end]
        problems += _contradictions(f"bag {name!r}", label, bag)
        rng = numpy_generator(seed, "witness_rate", name)
        share = keep_negatives if label == 1 or negative_bags else 1.0
        positives = _draw(np.flatnonzero(bag == 1), keep_positives, label, rng)
        negatives = _draw(np.flatnonzero(bag != 1), share, 1 - label, rng)
        kept.append(start + np.sort(np.concatenate([positives, negatives])))
    raise_problems(problems)
    return np.concatenate(kept)


def split_into_sub_bags(
    labels_per_instance: npt.ArrayLike, bag_label: int, *, size: int = SUB_BAG_SIZE, seed: int = 0
) -> list[_Indices]:
    """Divide the instances of one bag at random into the fewest sub-bags of at most `size`, equal to within one.

    Positives and negatives are dealt out separately, so each sub-bag of a positive bag is truly positive, with a
    witness rate near that of the bag. A positive bag of fewer positives than that gives only as many sub-bags as
    it has positives, which are then larger than `size`: every instance is in exactly one sub-bag.

    Args:
        labels_per_instance: (N,) 1 or 0; in a negative bag -1 (unknown) means 0.
        bag_label: 1 or 0.
        size: The most instances of a sub-bag; a bag that is not larger stays whole.
        seed: Another seed divides otherwise.

    Returns:
        The indices of each sub-bag, rising.

    Raises:
        InputError: If the size is below 1, the bag empty, or the labels contradict.
    """
    if size < 1:
        raise InputError(f"the size of sub-bags must be at least 1, got {size}")
    labels, of_bag, _ = _as_arrays(labels_per_instance, [bag_label], [0, np.size(labels_per_instance)])
    raise_problems(_contradictions("the bag", int(of_bag[0]), labels))
    positives, negatives = np.flatnonzero(labels == 1), np.flatnonzero(labels != 1)
    count = math.ceil(len(labels) / size)
    if bag_label == 1:
        # The paper says "cannot be less than the number of positive instances"; only "more" keeps labels true.
        count = min(count, len(positives))
    rng = np.random.default_rng(seed)
    dealt = np.concatenate([rng.permutation(positives), rng.permutation(negatives)])
    return [np.sort(dealt[number::count]) for number in range(count)]


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
    _check_share("keep_negatives", keep_negatives)
    _check_share("keep_positives", keep_positives)
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
    bags = _new_bags(cohort, plans, out)

    settings: dict[str, Any] = {
        "source": SOURCE,
        "cohort": cohort.name,
        "fingerprint": _fingerprint(cohort, labels),
        "keep_negatives": float(keep_negatives),
        "keep_positives": float(keep_positives),
        "negative_bags": negative_bags,
        "sub_bag_size": sub_bag_size,
        "seed": seed,
        "splits": [name for name in SPLITS if name in splits],
    }
    original = cohort.info
    info = CohortInfo(
        tile_size=original.tile_size, encoding=original.encoding, has_instance_labels=True, settings=settings
    )
    claim_folder(out, info)
    for done, _ in enumerate(map_in_threads(partial(_copy_bag, cohort=cohort, out=out), plans, workers), start=1):
        if progress is not None:
            progress(done, len(plans))
    if not (out / BAGS_FILE).exists():
        write_problems(out, [])
        write_bags(out, bags)
    return ResampleSummary(
        witness_rate_before=_rate(cohort.bags, labels, chosen),
        witness_rate_after=_rate(
            cohort.bags,
            [of_bag[_all_members(plan)] for of_bag, plan in zip(labels, plans, strict=True)],
            chosen,
        ),
        bags=len(bags),
        instances=int(bags["n_instances"].sum()),
    )


def _as_arrays(
    labels_per_instance: npt.ArrayLike, bag_labels: npt.ArrayLike, offsets: npt.ArrayLike
) -> tuple[_Labels, _Indices, _Indices]:
    """The arrays with one type each, after checking that they fit together."""
    labels = np.asarray(labels_per_instance)
    of_bags = np.asarray(bag_labels)
    starts = np.asarray(offsets, dtype=np.int64)
    if not np.isin(labels, (UNKNOWN_LABEL, 0, 1)).all():
        raise InputError("instance labels must be 1, 0 or -1 (unknown)")
    if not np.isin(of_bags, (0, 1)).all():
        raise InputError("bag labels must be 1 or 0")
    if labels.ndim != 1 or of_bags.ndim != 1 or starts.shape != (len(of_bags) + 1,):
        shapes = f"instance labels {labels.shape}, bag labels {of_bags.shape}, offsets {starts.shape}"
        raise InputError(f"expected shapes (N,), (B,) and (B+1,), got {shapes}")
    if starts[0] != 0 or starts[-1] != len(labels) or (np.diff(starts) < 1).any():
        raise InputError(f"offsets must rise from 0 to the {len(labels)} instances, and no bag may be empty")
    return labels.astype(np.int8), of_bags.astype(np.int64), starts


def _check_share(name: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise InputError(f"{name} must be a share from 0 to 1, got {share}")


def _contradictions(where: str, label: int, labels: _Labels) -> list[Problem]:
    """What keeps a bag from being resampled."""
    unknown, positives = int((labels == UNKNOWN_LABEL).sum()), int((labels == 1).sum())
    if label == 0 and positives:
        return [Problem(where, f"is negative but {positives} of its instances are labelled positive; correct either")]
    if label == 1 and unknown:
        advice = "label them in the table of instances and pack the cohort again, or leave this bag out of it"
        return [Problem(where, f"is positive and {unknown} of its {len(labels)} instances have no label; {advice}")]
    if label == 1 and not positives:
        return [Problem(where, "is positive but all its instances are labelled negative; correct either")]
    return []


def _draw(members: _Indices, share: float, least: int, rng: np.random.Generator) -> _Indices:
    """A random share of the members, at least `least` of them.

    What the generator gives does not depend on the share, so a smaller share is part of a larger one.
    """
    shuffled = rng.permutation(members)
    count = math.floor(share * len(members) + rng.random())
    return shuffled[: min(max(count, least), len(members))]


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


def _ground_truth(cohort: Cohort, chosen: npt.NDArray[np.bool_]) -> list[_Labels]:
    """The instance labels of each bag; those to be resampled must be whole and agree with the bag's label."""
    if not cohort.has_instance_labels:
        need = "resampling must know which instances are positive"
        advice = "add a column 'label' to its table of instances and pack it again"
        raise InputError(f"{cohort.path}: this cohort has no instance labels, and {need}; {advice}")
    labels = np.split(cohort.instance_labels(), cohort.offsets()[1:-1])
    rows = zip(cohort.bags["bag_id"].tolist(), cohort.bags["label"].tolist(), labels, chosen, strict=True)
    problems: list[Problem] = []
    for bag_id, label, of_bag, wanted in rows:
        problems += _contradictions(f"{cohort.path}, bag {bag_id!r}", label, of_bag) if wanted else []
    raise_problems(problems)
    return labels


def _divide(bag_id: str, kept: _Indices, labels: _Labels, label: int, size: int | None, seed: int) -> _Plan:
    if size is None:
        return _Plan(bag_id, [_Piece(bag_id, kept)])
    parts = split_into_sub_bags(labels[kept], label, size=size, seed=derive_seed(seed, "sub_bags", bag_id))
    if len(parts) == 1:
        return _Plan(bag_id, [_Piece(bag_id, kept)])
    return _Plan(bag_id, [_Piece(f"{bag_id}#{number}", kept[part]) for number, part in enumerate(parts, start=1)])


def _all_members(plan: _Plan) -> _Indices:
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


def _rate(bags: pd.DataFrame, labels: list[_Labels], chosen: npt.NDArray[np.bool_]) -> float:
    parts = [of_bag for of_bag, wanted in zip(labels, chosen, strict=True) if wanted]
    offsets = np.concatenate([[0], np.cumsum([len(of_bag) for of_bag in parts])])
    return witness_rate(np.concatenate(parts), bags["label"].to_numpy()[chosen], offsets)


def _fingerprint(cohort: Cohort, labels: list[_Labels]) -> str:
    """Changes when the original's bags, instance labels or settings change."""
    info = cohort.info.model_dump_json(exclude={"its2clr_version"})
    digest = hashlib.sha256(info.encode())
    digest.update(cohort.bags.to_csv(index=False, lineterminator="\n").encode("utf-8", "surrogateescape"))
    digest.update(np.concatenate(labels).tobytes())
    return digest.hexdigest()[:16]


def _copy_bag(plan: _Plan, *, cohort: Cohort, out: Path) -> None:
    """Write the tile files of one bag that are not there yet."""
    pending = [piece for piece in plan.pieces if not tile_path(out, piece.bag_id).exists()]
    if not pending:
        return
    tiles = cohort.tile_file(plan.bag_id)
    # while bags are being written the folder is not complete, so it must not look so
    (out / BAGS_FILE).unlink(missing_ok=True)
    for piece in pending:
        write_tile_file(
            tile_path(out, piece.bag_id),
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

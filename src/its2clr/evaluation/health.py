"""How a run is doing where no instance ground truth exists: what bag labels alone can prove or suspect.

Instances of negative bags are negative, so one that is scored positive is an error for certain. The rest is suspicion:
pseudo labels that keep flipping, seeds of the aggregator that disagree, positive bags without a pseudo-positive. An
instance is pseudo-positive when its probability > threshold (Algorithm 1).
"""

import math
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from its2clr.errors import InputError
from its2clr.evaluation.arrays import bag_offsets, both_classes, label_vector, rows, vector

FALSE_POSITIVE_LIMIT = 0.05
"""Warn above this share: with few positives in a bag, 5% false ones already rival the true ones."""
POSITIVE_LIMIT = 0.9
"""Warn above this share: whole bags called positive suggest a bag-level shortcut such as stain or scanner."""
CHURN_LIMIT = 0.2
"""Warn above this share of flipped pseudo labels in the last round: the iteration has not settled."""
EMPTY_BAG_LIMIT = 0.1
"""Warn above this share of positive bags in which no instance passes the threshold."""
SPEARMAN_LIMIT = 0.5
"""Warn below this rank correlation between seeds."""
KAPPA_LIMIT = 0.4
"""Warn below this agreement of pseudo labels between seeds ("fair" or worse, Landis and Koch 1977)."""
MEDIAN_AUC_LIMIT = 0.6
"""Warn above this `median_auc`, if it is also above `contrast_auc`."""
FEW_POSITIVES = 0.4
"""Below this share of pseudo-positives the median instance of a positive bag should be negative."""
CLOSEST = 1e-7
"""A probability closer than this to 0 or 1 counts as this close, since log-odds have no end."""
BOUND_FAILS = 0.1
"""Chance that the bound by which `estimate_witness_rate` chooses its cut does not hold."""


class RoundHealth(TypedDict):
    """The numbers of one round; None where one is not defined."""

    round: int
    threshold: float
    median_auc: float | None
    contrast_auc: float | None
    false_positive_share: float | None
    positive_share: float | None
    churn: float | None
    seed_spearman: float | None
    seed_kappa: float | None
    empty_positive_bags: int


class HealthReport(TypedDict):
    """How many bags of each label there are, and the numbers of every round."""

    positive_bags: int
    negative_bags: int
    rounds: list[RoundHealth]


class SeedAgreement(NamedTuple):
    """Mean pairwise agreement between seeds; nan where no pair is defined."""

    spearman: float
    kappa: float


def false_positive_share(probabilities: ArrayLike, bag_labels_per_instance: ArrayLike, threshold: float) -> float:
    """Share of the instances of negative bags that are scored positive; nan without negative bags."""
    return _share_above(probabilities, bag_labels_per_instance, threshold, bag_label=0)


def positive_share(probabilities: ArrayLike, bag_labels_per_instance: ArrayLike, threshold: float) -> float:
    """Share of the instances of positive bags that are pseudo-positive; nan without positive bags."""
    return _share_above(probabilities, bag_labels_per_instance, threshold, bag_label=1)


def churn(previous: ArrayLike | None, current: ArrayLike, bag_labels_per_instance: ArrayLike | None = None) -> float:
    """Share of the instances of positive bags whose pseudo label changed between two rounds.

    Args:
        previous: (N,) pseudo labels (0 or 1) of the round before. None in the first round, which gives nan.
        current: (N,) pseudo labels of this round.
        bag_labels_per_instance: (N,) labels of the instances' bags. None if all instances are of positive bags.
    """
    now = label_vector(current, "current pseudo labels")
    if previous is None:
        return float("nan")
    changed = label_vector(previous, "previous pseudo labels", now.size) != now
    if bag_labels_per_instance is not None:
        changed = changed[label_vector(bag_labels_per_instance, "bag labels per instance", now.size) == 1]
    return float(changed.mean()) if changed.size else float("nan")


def seed_agreement(
    probabilities: ArrayLike, threshold: float, bag_labels_per_instance: ArrayLike | None = None
) -> SeedAgreement:
    """How far aggregators trained from different seeds agree on the instances of positive bags.

    Args:
        probabilities: (S, N), one row per seed.
        threshold: Probability above which an instance is pseudo-positive.
        bag_labels_per_instance: (N,) labels of the instances' bags. None if all instances are of positive bags.

    Returns:
        Mean over pairs of seeds of Spearman's rank correlation of the probabilities, and of Cohen's kappa of the pseudo
        labels. A pair counts only where the number is defined: no correlation with a constant row, no kappa where both
        seeds call all instances the same.
    """
    from scipy.stats import spearmanr
    from sklearn.metrics import cohen_kappa_score

    seeds = rows(probabilities, "probabilities", np.shape(probabilities)[-1] if np.ndim(probabilities) else 0)
    if bag_labels_per_instance is not None:
        labels = label_vector(bag_labels_per_instance, "bag labels per instance", seeds.shape[1])
        seeds = seeds[:, labels == 1]
    if seeds.shape[1] == 0:
        return SeedAgreement(float("nan"), float("nan"))
    correlations, kappas = [], []
    for first, second in combinations(seeds, 2):
        if np.ptp(first) > 0 and np.ptp(second) > 0:
            correlations.append(float(spearmanr(first, second).statistic))
        called, called_too = first > threshold, second > threshold
        if np.unique([called, called_too]).size > 1:
            kappas.append(float(cohen_kappa_score(called, called_too)))
    return SeedAgreement(_mean(correlations), _mean(kappas))


def median_auc(probabilities: ArrayLike, bag_labels: ArrayLike, offsets: ArrayLike) -> float:
    """AUC of bag labels when a bag is scored by its median instance; nan with one class only.

    Where few instances are positive, the median instance of a positive bag is negative, like those of negative bags. If
    it tells the bag's label all the same, the scores follow what the whole bag shares: stain, scanner, patient.
    """
    return _auc_by_bag(probabilities, bag_labels, offsets, np.median)


def contrast_auc(probabilities: ArrayLike, bag_labels: ArrayLike, offsets: ArrayLike) -> float:
    """AUC of bag labels when a bag is scored by how far its top instance stands out; nan with one class only.

    That is the log-odds of the top instance less those of the median instance, so what the whole bag shares cancels.
    From round to round it rises with the instance AUC, which cannot be measured without ground truth; the bag AUC may
    be high for stain alone. Do not compare aggregators by it: it favours one that overfits its training bags.
    """
    from scipy.special import logit

    odds = logit(np.clip(vector(probabilities, "probabilities"), CLOSEST, 1 - CLOSEST))
    return _auc_by_bag(odds, bag_labels, offsets, lambda bag: bag.max() - np.median(bag))


def health_report(
    rounds: Sequence[ArrayLike], bag_labels: ArrayLike, offsets: ArrayLike, thresholds: Sequence[float]
) -> HealthReport:
    """The health of each round.

    Args:
        rounds: Probabilities of each round, (N,) or (S, N) for S seeds; pseudo labels come from the mean over seeds.
        bag_labels: (B,) bag labels, 0 or 1.
        offsets: (B + 1,): bag b holds instances offsets[b] to offsets[b + 1].
        thresholds: For each round the probability above which an instance is pseudo-positive.

    Returns:
        `positive_bags`, `negative_bags`, and for each of `rounds` the numbers that the functions of this module give,
        and `empty_positive_bags`: in how many positive bags no instance passes the threshold. What is not defined is
        None, so that the report is valid JSON.

    Raises:
        InputError: If there is no round, or shapes or labels do not fit.
    """
    if not len(rounds):
        raise InputError("health: expected the probabilities of at least one round, got none")
    labels = label_vector(bag_labels, "bag labels")
    starts = bag_offsets(offsets, int(np.shape(rounds[0])[-1]) if np.ndim(rounds[0]) else 0)
    if starts.size != labels.size + 1:
        raise InputError(f"offsets: expected {labels.size + 1} for {labels.size} bags, got {starts.size}")
    per_instance = np.repeat(labels, np.diff(starts))
    bags = np.repeat(np.arange(labels.size), np.diff(starts))

    histories: list[RoundHealth] = []
    previous: NDArray[np.bool_] | None = None
    for number, (probabilities, threshold) in enumerate(zip(rounds, thresholds, strict=True)):
        seeds = rows(probabilities, f"probabilities of round {number}", per_instance.size)
        mean = seeds.mean(axis=0)
        current = mean > threshold
        agreement = seed_agreement(seeds, threshold, per_instance)
        found = np.bincount(bags, weights=current, minlength=labels.size) > 0
        histories.append(
            {
                "round": number,
                "threshold": float(threshold),
                "median_auc": _or_none(median_auc(mean, labels, starts)),
                "contrast_auc": _or_none(contrast_auc(mean, labels, starts)),
                "false_positive_share": _or_none(false_positive_share(mean, per_instance, threshold)),
                "positive_share": _or_none(positive_share(mean, per_instance, threshold)),
                "churn": _or_none(churn(previous, current, per_instance)),
                "seed_spearman": _or_none(agreement.spearman),
                "seed_kappa": _or_none(agreement.kappa),
                "empty_positive_bags": int(np.count_nonzero((labels == 1) & ~found)),
            }
        )
        previous = current
    return {
        "positive_bags": int((labels == 1).sum()),
        "negative_bags": int((labels == 0).sum()),
        "rounds": histories,
    }


def warnings_of(report: HealthReport) -> list[str]:
    """What is wrong in the last round of a `health_report`, a sentence each; limits are constants of this module."""
    positive_bags, last = report["positive_bags"], report["rounds"][-1]
    false_positives, positives, flipped = last["false_positive_share"], last["positive_share"], last["churn"]
    spearman, kappa, empty = last["seed_spearman"], last["seed_kappa"], last["empty_positive_bags"]

    warnings = []
    too_many = false_positives is not None and false_positives > FALSE_POSITIVE_LIMIT
    too_few = bool(positive_bags) and empty / positive_bags > EMPTY_BAG_LIMIT
    if too_many and too_few:
        warnings.append(
            f"scores of positives and negatives overlap: {false_positives:.0%} of instances from negative bags are "
            f"scored positive, but {empty} of {positive_bags} positive bags have no instance scored positive; no "
            "threshold mends both: pretrain longer or with other views"
        )
    elif too_many:
        warnings.append(
            f"{false_positives:.0%} of instances from negative bags are scored positive: "
            "raise refine.threshold (with threshold_rule=negative_bags lower refine.false_positive_rate) or train the "
            "aggregator longer"
        )
    if false_positives is not None and positives is not None and positives <= false_positives > 0:
        warnings.append(
            f"instances are scored positive no more often in positive bags ({positives:.0%}) than in "
            f"negative bags ({false_positives:.0%}): the pseudo labels carry no information yet"
        )
    elif positives is not None and positives > POSITIVE_LIMIT:
        warnings.append(
            f"{positives:.0%} of instances from positive bags are pseudo-positive: the model may read "
            "the bag (stain, scanner) rather than the instance"
        )
    shared, contrast = last["median_auc"], last["contrast_auc"]
    few = positives is None or positives < FEW_POSITIVES
    if few and shared is not None and contrast is not None and shared > max(contrast, MEDIAN_AUC_LIMIT):
        warnings.append(
            f"a bag's median instance tells its label (AUC {shared:.2f}) better than how far its top instance stands "
            f"out ({contrast:.2f}): scores follow what a whole bag shares (stain, scanner, patient); pretrain longer, "
            "with stronger colour views, or give the aggregator dropout"
        )
    if flipped is not None and flipped > CHURN_LIMIT:
        warnings.append(f"pseudo labels flipped by {flipped:.0%} in the last round: they have not settled")
    if too_few and not too_many:
        warnings.append(
            f"no pseudo-positive in {empty} of {positive_bags} positive bags: lower refine.threshold (with "
            "threshold_rule=negative_bags raise refine.false_positive_rate) or train the aggregator longer"
        )
    if (spearman is not None and spearman < SPEARMAN_LIMIT) or (kappa is not None and kappa < KAPPA_LIMIT):
        numbers = ", ".join(
            f"{name} {value:.2f}"
            for name, value in (("rank correlation", spearman), ("kappa", kappa))
            if value is not None
        )
        warnings.append(f"seeds disagree ({numbers}) on which instances are positive: train the aggregator longer")
    return warnings


def start_kept(aucs: Sequence[float], improved: Sequence[bool], stuck: str | None = None) -> str | None:
    """A sentence if no round was better than the first, so that the refined encoder is the one it started from.

    Args:
        aucs: The validation AUC of every round that selection goes by.
        improved: Whether each round was the best so far.
        stuck: If training was stuck: what to do about that. Otherwise more training is advised.
    """
    if len(improved) < 2 or any(improved[1:]):
        return None
    return (
        f"no round improved on the start (validation AUC {aucs[0]:.3f}, later at best {max(aucs[1:]):.3f}): the "
        f"refined encoder is the start. {stuck or 'Try a higher refine.learning_rate or more refine.epochs'}"
    )


def estimate_witness_rate(scores: ArrayLike, bag_labels_per_instance: ArrayLike) -> float:
    """An estimate of the share of positives among the instances of positive bags, from bag labels alone.

    The instances of positive bags are a mixture: a share w of positives, the rest like the instances of negative bags.
    So for any cut c, P(score <= c | positive bag) >= (1 - w) P(score <= c | negative bag), with equality where no
    positive scores that low: the smallest ratio of the two is 1 - w. The cut is chosen by an upper bound of that ratio,
    so that ratios of few instances do not count (best bin estimation; Garg et al., Mixture proportion estimation and PU
    learning, NeurIPS 2021).

    Only positives that score higher than negatives are seen, so poor scores make the estimate too small. What all
    instances of positive bags share (a stain, a scanner) is taken for witnesses.

    Args:
        scores: (N,) of instances the scoring model was not trained on, such as those of validation bags; higher is
            more positive.
        bag_labels_per_instance: (N,) label of each instance's bag.

    Raises:
        InputError: If bags of one label are missing.
    """
    values = vector(scores, "scores")
    labels = label_vector(bag_labels_per_instance, "bag labels per instance", values.size)
    negative, positive = np.sort(values[labels == 0]), np.sort(values[labels == 1])
    if not (negative.size and positive.size):
        raise InputError("an estimate of the witness rate needs instances of both positive and negative bags")
    below = np.searchsorted(negative, negative, side="right") / negative.size
    mixed = np.searchsorted(positive, negative, side="right") / positive.size
    slack = sum(math.sqrt(math.log(4 / BOUND_FAILS) / (2 * group.size)) for group in (negative, positive))
    best = int(np.argmin((mixed + slack) / below))
    return float(np.clip(1 - mixed[best] / below[best], 0.0, 1.0))


def _auc_by_bag(
    scores: ArrayLike,
    bag_labels: ArrayLike,
    offsets: ArrayLike,
    of_bag: Callable[[NDArray[np.float64]], float | np.floating[Any]],
) -> float:
    """AUC of bag labels when a bag's score is `of_bag` of its instances; nan with one class only."""
    from sklearn.metrics import roc_auc_score

    labels, flat = label_vector(bag_labels, "bag labels"), vector(scores, "scores")
    if not both_classes(labels):
        return float("nan")
    starts = bag_offsets(offsets, flat.size)
    return float(roc_auc_score(labels, [float(of_bag(flat[start:end])) for start, end in pairwise(starts)]))


def _share_above(
    probabilities: ArrayLike, bag_labels_per_instance: ArrayLike, threshold: float, bag_label: int
) -> float:
    labels = label_vector(bag_labels_per_instance, "bag labels per instance")
    chosen = vector(probabilities, "probabilities", labels.size)[labels == bag_label]
    return float((chosen > threshold).mean()) if chosen.size else float("nan")


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else value

"""Do no harm: a run hands over the refined encoder only if it is better than the start on the validation bags.

Both encoders are judged with the run's own aggregator, by how they rank the validation bags. Training bags do not take
part: the refined encoder has learned from their labels, so aggregators new to them would flatter it all the same.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from its2clr.files import read_json
from its2clr.run.names import END_TO_END, REFINED, START

HANDOVER_FILE = "handover.json"
CONFIDENCE = 0.5
"""The refined encoder is handed over if the comparison is surer than this that it is the better one."""


def preferred_encoders(run: Path) -> tuple[str, ...]:
    """The encoders of a run in the order in which a user wants them: the one that is handed over comes first."""
    file = run / HANDOVER_FILE
    if file.is_file() and read_json(file)["encoder"] == START:
        return (START, REFINED, END_TO_END)
    return (REFINED, END_TO_END, START)


def compare(
    labels: NDArray[np.int64], start: NDArray[np.float64], refined: NDArray[np.float64], groups: NDArray[np.str_]
) -> dict[str, Any]:
    """Which encoder is handed over, by how much it is better and how sure that is.

    The encoders are compared by their AUC; if both put all pairs of bags in the same order, by the log loss, in which
    both classes weigh the same.

    Args:
        labels: (bags,) labels of the validation bags.
        start: (bags,) their probabilities with the start.
        refined: (bags,) the same with the refined encoder.
        groups: (bags,) their groups; bags of a group are not independent, so the test is over groups.

    Returns:
        `encoder`, the two values of the `measure`, `gain` (how much better the refined encoder is), its standard
        error, and `confidence`, the probability that the refined encoder is better.
    """
    measure, values, influence = "AUC", *_compared_by_auc(labels, start, refined)
    if not influence.any():
        measure, values, influence = "log loss", *_compared_by_log_loss(labels, start, refined)
    gain = values[1] - values[0] if measure == "AUC" else values[0] - values[1]
    _, group = np.unique(groups, return_inverse=True)
    of_groups, count = np.bincount(group, weights=influence), int(group.max()) + 1
    error = math.sqrt((of_groups**2).sum() * count / (count - 1)) if count > 1 else math.inf
    confidence = 0.5 if error in (0.0, math.inf) else 0.5 * (1 + math.erf(gain / error / math.sqrt(2)))
    return {
        "encoder": REFINED if confidence > CONFIDENCE else START,
        "measure": measure,
        "start": values[0],
        "refined": values[1],
        "gain": gain,
        "standard_error": error if math.isfinite(error) else None,
        "confidence": confidence,
        "bags": len(labels),
        "groups": count,
    }


Compared = tuple[tuple[float, float], NDArray[np.float64]]
"""The values of start and refined, and (bags,) how far each bag moves their difference away from its mean."""


def _compared_by_auc(labels: NDArray[np.int64], start: NDArray[np.float64], refined: NDArray[np.float64]) -> Compared:
    """The spread is DeLong's (1988): of each bag the share of its pairs in the right order, ties counting one half."""
    positive = labels == 1

    def right(scores: NDArray[np.float64]) -> NDArray[np.float64]:  # (positive, negative) bags
        above = scores[positive][:, None] - scores[~positive][None]
        return np.where(above == 0, 0.5, above > 0)

    pairs = right(refined) - right(start)
    influence = np.empty(len(labels))
    influence[positive] = (pairs.mean(axis=1) - pairs.mean()) / positive.sum()
    influence[~positive] = (pairs.mean(axis=0) - pairs.mean()) / (~positive).sum()
    return (float(right(start).mean()), float(right(refined).mean())), influence


def _compared_by_log_loss(
    labels: NDArray[np.int64], start: NDArray[np.float64], refined: NDArray[np.float64]
) -> Compared:
    from its2clr.aggregators.trained import balanced_log_loss  # loads torch, which showing a run does not need

    losses = [balanced_log_loss(labels, scores) for scores in (start, refined)]
    gains = losses[0] - losses[1]
    for label in (0, 1):
        gains[labels == label] -= gains[labels == label].mean()
    return (float(losses[0].sum()), float(losses[1].sum())), gains


def said(found: dict[str, Any]) -> str:
    """The comparison in a sentence."""
    if "measure" not in found:  # a run of an older version
        found = found | {"measure": "log loss", "start": found["start_log_loss"], "refined": found["refined_log_loss"]}
    values = f"{found['measure']} {found['start']:.3f} with the start, {found['refined']:.3f} refined"
    sure = f"{found['confidence']:.0%} sure that refined is better"
    return f"the {found['encoder']} encoder is handed over: on {found['bags']} validation bags {values}; {sure}"

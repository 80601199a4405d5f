"""Do no harm: a run hands over the refined encoder only if it is better than the start on the validation bags.

Both encoders are judged with the run's own aggregator, by the log loss of every validation bag. Training bags do not
take part: the refined encoder has learned from their labels, so aggregators new to them would flatter it all the same.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from its2clr.files import read_json
from its2clr.run.names import END_TO_END, REFINED, START

HANDOVER_FILE = "handover.json"
CONFIDENCE = 0.7
"""How sure the comparison must be; below it the start is handed over."""


def preferred_encoders(run: Path) -> tuple[str, ...]:
    """The encoders of a run in the order in which a user wants them: the one that is handed over comes first."""
    file = run / HANDOVER_FILE
    if file.is_file() and read_json(file)["encoder"] == START:
        return (START, REFINED, END_TO_END)
    return (REFINED, END_TO_END, START)


def compare(start: NDArray[np.float64], refined: NDArray[np.float64], groups: NDArray[np.str_]) -> dict[str, Any]:
    """Which encoder is handed over, by how much it is better and how sure that is.

    Args:
        start: (bags,) what each validation bag adds to the log loss with the start.
        refined: (bags,) the same with the refined encoder.
        groups: (bags,) their groups; bags of a group are not independent, so the test is over groups.

    Returns:
        `encoder`, the two losses, `gain` (loss of the start minus that of the refined encoder), its standard error,
        and `confidence`, the probability that the refined encoder is better.
    """
    _, group = np.unique(groups, return_inverse=True)
    gains = np.bincount(group, weights=start - refined)
    gain, count = float(gains.sum()), len(gains)
    error = float(gains.std(ddof=1) * math.sqrt(count)) if count > 1 else math.inf
    confidence = 0.5 if error in (0.0, math.inf) else 0.5 * (1 + math.erf(gain / error / math.sqrt(2)))
    return {
        "encoder": REFINED if confidence >= CONFIDENCE else START,
        "start_log_loss": float(start.sum()),
        "refined_log_loss": float(refined.sum()),
        "gain": gain,
        "standard_error": error if math.isfinite(error) else None,
        "confidence": confidence,
        "bags": len(start),
        "groups": count,
    }


def said(found: dict[str, Any]) -> str:
    """The comparison in a sentence."""
    losses = f"log loss {found['start_log_loss']:.3f} with the start, {found['refined_log_loss']:.3f} refined"
    sure = f"{found['confidence']:.0%} sure that refined is better"
    return f"the {found['encoder']} encoder is handed over: on {found['bags']} validation bags {losses}; {sure}"

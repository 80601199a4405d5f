"""What a trial is judged by: the only place that says which number a search improves, and in which direction.

The number comes from validation bags: the log loss of the mean probability of a round's aggregators, which is less
noisy than their AUC. No aggregator learns its weights from these bags, but they choose its epoch or penalty.
"""

from pathlib import Path
from typing import Literal

from its2clr.files import read_json

MEASURE = "validation log loss of the encoder that is kept"
"""What the number is, for tables and pages."""
DIRECTION: Literal["maximize", "minimize"] = "minimize"
"""Which of two numbers is better, in Optuna's words."""


def judged(run: Path, up_to: int | None = None) -> float | None:
    """How good a run is, by the last of its rounds that passed the gate: its encoder is the one that is kept.

    Args:
        run: Folder of the run.
        up_to: Count rounds up to this epoch only; None: all.

    Returns:
        The number of that round; None before the first.
    """
    rounds = [read_json(path) for path in sorted(run.glob("rounds/*/metrics.json"))]
    passed = [found for found in rounds if found["improved"] and (up_to is None or found["epoch"] <= up_to)]
    return float(passed[-1]["validation_loss"]) if passed else None

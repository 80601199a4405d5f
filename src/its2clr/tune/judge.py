"""What a trial is judged by: the only place that says which number a search improves, and in which direction.

The number comes from validation bags. No aggregator learns its weights from them, but they choose its epoch.
"""

from pathlib import Path
from typing import Literal

from its2clr.files import read_json

MEASURE = "best validation AUC over the rounds"
"""What the number is, for tables and pages."""
DIRECTION: Literal["maximize", "minimize"] = "maximize"
"""Which of two numbers is better, in Optuna's words."""


def judged(run: Path, up_to: int | None = None) -> float | None:
    """How good a run is, by the rounds that it recorded.

    Args:
        run: Folder of the run.
        up_to: Count rounds up to this epoch only; None: all.

    Returns:
        The best number so far; None before the first round.
    """
    rounds = [read_json(path) for path in sorted(run.glob("rounds/*/metrics.json"))]
    values = [float(found["validation_auc"]) for found in rounds if up_to is None or found["epoch"] <= up_to]
    return max(values, default=None)

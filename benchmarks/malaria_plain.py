"""What a plain first attempt on the malaria smears is told, without ground truth (docs/results-real.md).

    its2clr fit COHORT --out RUN --recipe benchmarks/malaria_plain.yaml
    python benchmarks/malaria_plain.py RUN benchmarks/results/malaria_plain.json

Reads the run as its report does: rounds, health from bag labels, why it stopped. Pseudo-label quality, which does need
ground truth, is kept beside it to judge the warnings by.
"""

import json
import sys
from pathlib import Path
from typing import Any

from its2clr.cohort import Cohort
from its2clr.files import read_json, write_json
from its2clr.report.rounds import rounds_of_training
from its2clr.run.saved import read_run_config

KEPT = ("epoch", "threshold", "validation_auc", "false_positive_share", "positive_share", "empty_positive_bags")
KEPT += ("median_auc", "contrast_auc", "instance_auc", "instance_max_f1", "precision", "recall")


def main(run: Path, out: Path) -> None:
    opened = read_run_config(run)
    if opened is None:
        sys.exit(f"{run}: not the folder of a run")
    cohort = opened[1]
    rounds, health = rounds_of_training(run, Cohort.open(cohort))
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    epochs = [entry for entry in map(json.loads, lines) if entry["stage"] == "refine"]
    failure = run / "failure.json"
    found: dict[str, Any] = {
        "stopped": read_json(failure)["error"] if failure.is_file() else None,
        "warnings": health["warnings"] if health else [],
        "rounds": [{key: entry[key] for key in KEPT} for entry in rounds],
        "refine": [{key: entry[key] for key in ("epoch", "loss", "spread")} for entry in epochs],
    }
    write_json(out, found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

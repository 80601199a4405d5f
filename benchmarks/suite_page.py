"""Put what benchmarks/suite.py found into docs/results-real.md, between its markers.

    python benchmarks/suite_page.py docs/results-real.md benchmarks/results/suite.json [FILE ...] [--split test]

Runs in further FILEs, such as those of other machines, are merged into the first one.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from its2clr.files import read_json, write_json, write_text

BEGIN, END = "<!-- suite: begin -->", "<!-- suite: end -->"
MEASURES = {"bag_auc": "bag AUC", "instance_auc": "instance AUC", "instance_auprc": "instance AUPRC"}
START, TRUTH = "start", "ground truth"
KEY = ("split", "cohort", "row", "sampling", "training")
NO_GAP = "no clear gap"
SPLITS = {"val": "validation bags", "test": "test bags"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--split", choices=list(SPLITS), default="test")
    args = parser.parse_args()
    found = merged(read_json(file) for file in args.results)
    if len(args.results) > 1:
        write_json(args.results[0], found)
    before, _, rest = args.page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    tables = sections(found, args.split) or ["No runs yet."]
    write_text(args.page, "\n\n".join([before + BEGIN, *tables, END + after]))


def merged(documents: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """All runs of several results; of the same run the later one. What is there by now is not missing."""
    documents = list(documents)
    order = {part: list(dict.fromkeys(name for one in documents for name in one[part])) for part in ("cohorts", "rows")}
    runs, missing = (
        {tuple(one[key] for key in KEY): one for document in documents for one in document[part]}
        for part in ("runs", "missing")
    )
    return {**order, "runs": list(runs.values()), "missing": [one for key, one in missing.items() if key not in runs]}


def sections(found: dict[str, Any], split: str) -> list[str]:
    """A heading, a table and what should be known about it, for every cohort that was run."""
    parts = []
    for cohort in found["cohorts"]:
        runs, missing = (
            [one for one in found[part] if (one["cohort"], one["split"]) == (cohort, split)]
            for part in ("runs", "missing")
        )
        if runs or missing:
            parts.append(f"### {cohort}, {SPLITS[split]}")
            parts += [table(summarised(runs, found["rows"]))] if runs else []
            parts += notes(runs, missing)
    return parts


def summarised(runs: list[dict[str, Any]], order: list[str]) -> list[dict[str, Any]]:
    """Every row of one cohort and split.

    Returns:
        Of each row its name, the number of runs, and of each measure: mean; sample deviation (None for one run);
        share of the gap from start to ground truth that it closes, of the means over the runs that all three have
        (None if ground truth is not ahead by more than two standard errors of the paired differences); how many of its
        runs are below their start; how many have one.
    """
    flat = pd.DataFrame(runs).set_index(["row", "sampling", "training"])[list(MEASURES)].astype(float)
    by_row = {str(row): own.droplevel("row") for row, own in flat.groupby("row")}
    none = flat.iloc[:0].droplevel("row")
    start, truth = by_row.get(START, none), by_row.get(TRUTH, none)
    ahead = (truth - start).dropna()
    clear = ahead.mean() > 2 * ahead.std(ddof=1) / np.sqrt(max(len(ahead), 1))
    rows = []
    for row in sorted(by_row, key=order.index):
        own = by_row[row]
        difference = (own - start).dropna()
        shared = difference.index.intersection(truth.index)
        closed = difference.loc[shared].mean() / (truth.loc[shared] - start.loc[shared]).mean()
        rows.append({"row": row, "runs": len(own)} | {
            name: {
                "mean": float(own[name].mean()),
                "deviation": float(own[name].std(ddof=1)) if len(own) > 1 else None,
                "closed": float(closed[name]) if clear[name] and len(shared) else None,
                "below": int((difference[name] < 0).sum()),
                "paired": len(difference),
            }
            for name in MEASURES
        })  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    head = ["", "runs", *MEASURES.values(), "gap closed", "below start"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    begins = [row["row"] for row in rows].index(START) if any(row["row"] == START for row in rows) else len(rows)
    for number, row in enumerate(rows):
        measures = [row[name] for name in MEASURES]
        deviations = ["" if one["deviation"] is None else f" ± {one['deviation']:.3f}" for one in measures]
        cells = [f"{one['mean']:.3f}{deviation}" for one, deviation in zip(measures, deviations, strict=True)]
        cells += ["", ""]
        if number > begins and measures[0]["paired"]:  # what stands above the start does not begin with it
            closed = [NO_GAP if one["closed"] is None else f"{one['closed']:.0%}" for one in measures]
            cells[-2] = closed[0] if len(set(closed)) == 1 else " / ".join(closed)
            cells[-1] = " / ".join(f"{one['below']}" for one in measures) + f" of {measures[0]['paired']}"
        lines.append(f"| {row['row']} | {row['runs']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def notes(runs: list[dict[str, Any]], missing: list[dict[str, Any]]) -> list[str]:
    """What a table does not show: settings that differ, runs that handed over their start, runs that failed."""
    said = []
    settings = list(dict.fromkeys(one["settings"] for one in runs))
    if len(settings) > 1:
        said.append(f"The runs have different settings: {'; '.join(settings)}.")
    refined = pd.DataFrame([one for one in runs if "handed_over" in one], columns=["row", "handed_over"])
    for row, handed in refined.groupby("row", sort=False)["handed_over"]:
        if (kept := int((handed == START).sum())) > 0:
            said.append(f"{row}: {kept} of {len(handed)} runs handed over their start.")
    grouped: dict[tuple[str, str], int] = {}
    for one in missing:
        grouped[one["row"], one["why"]] = grouped.get((one["row"], one["why"]), 0) + 1
    said += [f"Missing: {row}, {count} runs: {why}." for (row, why), count in grouped.items()]
    return [" ".join(said)] if said else []


if __name__ == "__main__":
    main()

"""Writes what was found: Markdown and CSV for people, JSON for programs, ours beside the paper's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from its2clr.experiments.collect import Found, Point, paper_number
from its2clr.experiments.spec import Experiment, Number
from its2clr.experiments.verdicts import Comparison
from its2clr.files import atomic_path, write_json, write_text

LONGEST_NOTE = 200
"""Characters of a reason below a table; the whole of it is in the CSV."""


def table_markdown(spec: Experiment, found: Mapping[tuple[str, str], Found]) -> str:
    """A table with both numbers in every cell; reasons for missing ones are listed below it."""
    lines = ["| | " + " | ".join(spec.columns) + " |", "|---" * (len(spec.columns) + 1) + "|"]
    notes: dict[str, int] = {}
    for row in spec.rows:
        cells = [
            _cell(found[row, column], paper_number(spec, row, column), spec.digits, notes) for column in spec.columns
        ]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, *_footnotes(notes)])


def sweep_markdown(spec: Experiment, found: Mapping[tuple[str, str], Mapping[str, Found]]) -> str:
    """One row per value of each setting."""
    lines = ["| setting | value | bag AUC | instance AUC |", "|---|---|---|---|"]
    notes: dict[str, int] = {}
    for (name, value), metrics in found.items():
        cells = [_ours(metrics[metric], spec.digits, notes) for metric in ("bag_auc", "instance_auc")]
        lines.append(f"| {name} | {value} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, *_footnotes(notes)])


def curves_markdown(curves: Mapping[tuple[str, str], Sequence[Point]]) -> str:
    """First and last point of every curve."""
    lines = ["| line | first | last |", "|---|---|---|"]
    for (name, quantity), points in curves.items():
        if points:
            first, last = points[0], points[-1]
            shown = [f"{point.mean:.3f} ± {point.spread:.3f} (at {point.x:g})" for point in (first, last)]
            lines.append(f"| {name}, {quantity} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def table_frame(spec: Experiment, found: Mapping[tuple[str, str], Found]) -> pd.DataFrame:
    """One row per cell: ours, spread, the paper's."""
    return pd.DataFrame(
        [
            {"row": row, "column": column, **_numbers(ours), **_paper(paper_number(spec, row, column))}
            for (row, column), ours in found.items()
        ]
    )


def sweep_frame(found: Mapping[tuple[str, str], Mapping[str, Found]]) -> pd.DataFrame:
    """One row per value and metric."""
    return pd.DataFrame(
        [
            {"setting": name, "value": float(value), "metric": metric, **_numbers(ours)}
            for (name, value), metrics in found.items()
            for metric, ours in metrics.items()
        ]
    )


def curves_frame(curves: Mapping[tuple[str, str], Sequence[Point]]) -> pd.DataFrame:
    """One row per point."""
    rows = [
        {"line": name, "quantity": quantity, "x": point.x, "ours": point.mean, "spread": point.spread}
        for (name, quantity), points in curves.items()
        for point in points
    ]
    return pd.DataFrame(rows, columns=["line", "quantity", "x", "ours", "spread"])


def write_experiment(
    folder: Path,
    spec: Experiment,
    body: str,
    verdict: str,
    frame: pd.DataFrame,
    comparisons: Sequence[Comparison],
    settings: Mapping[str, Any],
) -> str:
    """Write table.csv, result.json and README.md of an experiment, and give its section of the page."""
    section = [f"## `{spec.label}`: {spec.title}", f"Paper: {spec.paper_data}. {spec.about}".strip()]
    section += [part for part in (body, verdict) if part]
    if (folder / "plot.png").is_file():
        section.append(f"![{spec.title}]({spec.folder}/plot.png)")
    text = "\n\n".join(section) + "\n"
    with atomic_path(folder / "table.csv") as temporary:
        frame.to_csv(temporary, index=False)
    write_json(
        folder / "result.json",
        {
            "label": spec.label,
            "title": spec.title,
            **settings,
            "rows": frame.astype(object).where(frame.notna(), None).to_dict("records"),
            "comparisons": [vars(one) for one in comparisons],
        },
    )
    write_text(folder / "README.md", text.replace(f"({spec.folder}/", "(").replace("## ", "# ", 1))
    return text


def _cell(ours: Found, paper: Number | None, digits: int, notes: dict[str, int]) -> str:
    if paper is None:
        return f"{_ours(ours, digits, notes)}<br>*not in the paper*"
    printed = f"{paper.mean:.{digits}f}" + ("" if paper.std is None else f" ± {paper.std:.{digits}f}")
    return f"{_ours(ours, digits, notes)}<br>*paper {printed}*"


def _ours(ours: Found, digits: int, notes: dict[str, int]) -> str:
    reason = (ours.reason or "").split("\n")[0][:LONGEST_NOTE]
    mark = f"<sup>{notes.setdefault(reason, len(notes) + 1)}</sup>" if reason else ""
    if ours.mean is None:
        return f"-{mark}"
    spread = f" ± {ours.spread:.{digits}f}" if ours.spread else ""
    return f"**{ours.mean:.{digits}f}**{spread}{mark}"


def _footnotes(notes: Mapping[str, int]) -> list[str]:
    return ["", *(f"<sup>{number}</sup> {reason}  " for reason, number in notes.items())] if notes else []


def _numbers(ours: Found) -> dict[str, Any]:
    return {
        "ours": ours.mean,
        "spread": ours.spread,
        "spread_over": ours.over,
        "values": " ".join(f"{seed}:{value:.6g}" for seed, value in ours.values.items()),
        "reason": ours.reason,
    }


def _paper(paper: Number | None) -> dict[str, Any]:
    return {"paper": None, "paper_std": None} if paper is None else {"paper": paper.mean, "paper_std": paper.std}

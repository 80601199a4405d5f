"""Whether our numbers have the paper's order: one honest paragraph per table."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from its2clr.experiments.collect import Found, paper_number
from its2clr.experiments.spec import Experiment


@dataclass(frozen=True)
class Comparison:
    """One method against the reference, in one row or column.

    Attributes:
        line: The row (or column) in which they are compared.
        method: The other method.
        paper: Reference minus method in the paper.
        ours: Reference minus method here.
        spread: Root of the summed squared spreads of both.
        verdict: "same" order, "level" (our difference is within the spread), or "reversed".
    """

    line: str
    method: str
    paper: float
    ours: float
    spread: float
    verdict: Literal["same", "level", "reversed"]


def compare(spec: Experiment, found: Mapping[tuple[str, str], Found]) -> list[Comparison]:
    """Every method against the reference; settings and numbers that are no method are passed over."""
    if spec.methods is None or spec.reference is None:
        return []
    along_columns = spec.methods == "columns"
    lines, methods = (spec.rows, spec.columns) if along_columns else (spec.columns, spec.rows)
    comparisons = []
    for line in lines:
        for method, cell in methods.items():
            places = [(line, name) if along_columns else (name, line) for name in (spec.reference, method)]
            reference, other = (found[place] for place in places)
            if (
                method == spec.reference
                or cell.metric == "witness_rate"
                or reference.mean is None
                or other.mean is None
            ):
                continue
            paper = [paper_number(spec, *place).mean for place in places]
            ours = reference.mean - other.mean
            spread = math.hypot(reference.spread or 0.0, other.spread or 0.0)
            expected = paper[0] - paper[1]
            verdict: Literal["same", "level", "reversed"] = "same"
            if abs(ours) <= spread:
                verdict = "level"
            elif ours * expected < 0:
                verdict = "reversed"
            comparisons.append(Comparison(line, method, expected, ours, spread, verdict))
    return comparisons


def sentences(spec: Experiment, comparisons: list[Comparison]) -> str:
    """The comparisons in words: how many have the paper's order, and each that has not."""
    if not comparisons:
        return ""
    counts = {name: sum(one.verdict == name for one in comparisons) for name in ("same", "level", "reversed")}
    text = (
        f"Against {spec.reference}: {counts['same']} of {len(comparisons)} comparisons have the paper's order, "
        f"{counts['level']} are level within the spread, {counts['reversed']} are the other way round."
    )
    reversed_ = [
        f"{one.line}, {one.method}: {one.ours:+.{spec.digits}f} (paper {one.paper:+.{spec.digits}f})"
        for one in comparisons
        if one.verdict == "reversed"
    ]
    if reversed_:
        text += f"\n\nThe other way round, as {spec.reference} minus the other: {'; '.join(reversed_)}."
    level: dict[str, list[str]] = {}
    for one in comparisons:
        if one.verdict == "level":
            level.setdefault(one.method, []).append(one.line)
    if level:
        listed = "; ".join(f"{method} ({', '.join(lines)})" for method, lines in level.items())
        text += f"\n\nLevel with {spec.reference}: {listed}."
    return text

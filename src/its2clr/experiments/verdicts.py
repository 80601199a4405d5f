"""Whether methods come in the paper's order here too: some sentences per table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from its2clr.experiments.collect import Found
from its2clr.experiments.spec import Experiment

Verdict = Literal["same", "level", "reversed", "unknown"]
SIGN_TEST = 0.05


@dataclass(frozen=True)
class Comparison:
    """One method against the reference, in one row or column.

    Attributes:
        line: The row (or column) in which they are compared.
        method: The other method.
        paper: Reference minus method in the paper; None if it does not compare them.
        ours: Reference minus method here, mean over the seeds that have both.
        spread: Standard deviation of the seeds' differences; None with fewer than two.
        verdict: "same" order as the paper's, "level", "reversed", or "unknown" (no spread to judge by, or nothing in
            the paper to compare with). Level means that the mean difference is within the spread and that the seeds do
            not agree on its sign beyond chance (sign test at 5%, which takes six seeds). The sign test is there for
            methods that fail completely in some seeds: their spread is then as large as their loss.
    """

    line: str
    method: str
    paper: float | None
    ours: float
    spread: float | None
    verdict: Verdict


def compare(spec: Experiment, found: Mapping[tuple[str, str], Found]) -> list[Comparison]:
    """Every method against the reference, paired by seed: those of a seed start from the same pretraining."""
    if spec.methods is None or spec.reference is None:
        return []
    along_columns = spec.methods == "columns"
    lines, methods = (spec.rows, spec.columns) if along_columns else (spec.columns, spec.rows)
    comparisons = []
    for line in lines:
        for method, cell in methods.items():
            places = [(line, name) if along_columns else (name, line) for name in (spec.reference, method)]
            reference, other = (found[place].values for place in places)
            both = sorted(reference.keys() & other.keys())
            if method == spec.reference or cell.metric == "witness_rate" or not both:
                continue
            differences = np.array([reference[seed] - other[seed] for seed in both])
            ours = float(differences.mean())
            spread = float(differences.std(ddof=1)) if len(both) > 1 else None
            numbers = [spec.number(*place) for place in places]
            paper = None if numbers[0] is None or numbers[1] is None else numbers[0].mean - numbers[1].mean
            comparisons.append(Comparison(line, method, paper, ours, spread, _verdict(paper, differences)))
    return comparisons


def _verdict(paper: float | None, differences: NDArray[np.float64]) -> Verdict:
    if len(differences) < 2 or paper is None:
        return "unknown"
    ours = differences.mean()
    signs = np.sign(differences[differences != 0])
    agree = len(signs) > 0 and binomtest(int((signs > 0).sum()), len(signs)).pvalue <= SIGN_TEST
    if abs(ours) <= differences.std(ddof=1) and not (agree and signs.sum() * ours > 0):
        return "level"
    return "same" if ours * paper >= 0 else "reversed"


def sentences(spec: Experiment, comparisons: Sequence[Comparison]) -> str:
    """The comparisons in words: how many have the paper's order, which do not, and which the paper does not make."""
    papers = [one for one in comparisons if one.paper is not None]
    beyond = [
        f"{one.line}, {one.method}: {one.ours:+.{spec.digits}f}"
        + ("" if one.spread is None else f" ± {one.spread:.{spec.digits}f}")
        for one in comparisons
        if one.paper is None
    ]
    paragraphs = _against_the_paper(spec, papers) if papers else []
    if beyond:
        paragraphs.append(f"Not in the paper, as {spec.reference} minus the other: {'; '.join(beyond)}.")
    return "\n\n".join(paragraphs)


def _against_the_paper(spec: Experiment, comparisons: Sequence[Comparison]) -> list[str]:
    counts = Counter(one.verdict for one in comparisons)
    if counts["unknown"] == len(comparisons):
        return [f"One seed: no spread to compare the order with {spec.reference} by."]
    paragraphs = [
        f"Against {spec.reference}, by the seeds' differences: {counts['same']} of {len(comparisons)} comparisons have "
        f"the paper's order, {counts['level']} are level within the spread, {counts['reversed']} are the other way "
        "round." + (f" {counts['unknown']} have no spread to judge by." if counts["unknown"] else "")
    ]
    reversed_ = [
        f"{one.line}, {one.method}: {one.ours:+.{spec.digits}f} ± {one.spread:.{spec.digits}f} "
        f"(paper {one.paper:+.{spec.digits}f})"
        for one in comparisons
        if one.verdict == "reversed"
    ]
    if reversed_:
        paragraphs.append(f"The other way round, as {spec.reference} minus the other: {'; '.join(reversed_)}.")
    level = Counter(one.method for one in comparisons if one.verdict == "level")
    if level:
        of = Counter(one.method for one in comparisons)
        listed = ", ".join(f"{method} ({count} of {of[method]})" for method, count in level.items())
        paragraphs.append(f"Level with {spec.reference}: {listed}.")
    return paragraphs

"""Make docs/results-real.md from what benchmarks/malaria.py found on the test patients.

    python benchmarks/malaria_page.py benchmarks/results/malaria.json docs [RUN]

What the page says before the tables is docs/results-real/lead.md, written by hand. RUN is the folder of one run, whose
highest and lowest ranked test cells are drawn.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from its2clr.cohort import Cohort
from its2clr.cohort.tiles import decode
from its2clr.engine.files import read_json
from its2clr.results.scores import Model, RunScores

START, OURS, TRUTH = "SimCLR", "ItS2CLR", "Ground-truth finetuning"
BY_RATE = (START, OURS, "Cross-entropy", TRUTH)
CURVES = (OURS, "without iteration", "pseudo labels as in the paper")
QUALITY = {"instance_auc": "instance AUC", "precision": "precision of selected", "recall": "recall of selected"}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
SHOWN = 30


def main(numbers: Path, docs: Path, run: Path | None) -> None:
    found = read_json(numbers)
    folder = docs / "results-real"
    folder.mkdir(exist_ok=True)
    bags, cells = aggregators(found)
    table = flat(found["runs"], bags, cells)
    parts = [(folder / "lead.md").read_text(encoding="utf-8").strip()]
    rates = sorted(table["rate"].unique())
    parts += [rate_section(table[table["rate"] == rate], rate, bags, cells) for rate in rates]
    draw_rates(table, folder / "rates.png")
    draw_rounds(found["runs"], folder / "rounds.png")
    parts.append("## Over witness rates\n\n![Test AUC over witness rates](results-real/rates.png)")
    parts.append(
        "## Pseudo labels, round by round\n\nOn the training instances at witness rate 0.1, mean and deviation over "
        "all runs.\n\n![Instance AUC, precision and recall of the pseudo labels](results-real/rounds.png)"
    )
    if run is not None:
        draw_cells(run, cells, folder / "cells.png")
        parts.append(
            f"## Highest and lowest ranked cells\n\nTest patients of one run, {SHOWN} of each; framed: infected by the "
            "ground truth.\n\n![Highest and lowest ranked cells](results-real/cells.png)"
        )
    (docs / "results-real.md").write_text("\n\n".join(["# On real bags", *parts]) + "\n", encoding="utf-8")


def aggregators(found: dict[str, Any]) -> tuple[str, str]:
    """The aggregator that predicts bags, and the one that reads instances."""
    names = list(found["runs"][0]["aggregators"])
    return names[0], names[-1]


def flat(runs: list[dict[str, Any]], bags: str, cells: str) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                **{key: one[key] for key in ("rate", "row", "sampling", "training")},
                "bag AUC": one["aggregators"][bags]["bag_auc"],
                "instance AUC": one["aggregators"][cells]["instance_auc"],
                "instance AUPRC": one["aggregators"][cells]["instance_auprc"],
            }
            for one in runs
        ]
    )


def rate_section(table: pd.DataFrame, rate: float, bags: str, cells: str) -> str:
    """Mean and deviation of every row, the difference to ItS2CLR run by run, and the share of the gap closed."""
    metrics = ["bag AUC", "instance AUC", "instance AUPRC"]
    keyed = table.set_index(["row", "sampling", "training"])[metrics]
    ours = keyed.loc[OURS] if OURS in table["row"].to_numpy() else None
    runs = len(table) // table["row"].nunique()
    explained = (
        f"Bags by {bags}, instances by {cells}; mean ± deviation over {runs} runs, in brackets ItS2CLR minus the row, "
        "run by run."
    )
    lines = [
        f"## Witness rate {rate:g}",
        "",
        explained,
        "",
        "| | " + " | ".join(metrics) + " |",
        "|---" * (len(metrics) + 1) + "|",
    ]
    for row in table["row"].unique():
        own = keyed.loc[row]
        shown = [f"{own[name].mean():.3f} ± {own[name].std():.3f}" for name in metrics]
        if ours is not None and row != OURS:
            difference = (ours - own).dropna()
            shown = [
                f"{text} ({difference[name].mean():+.3f} ± {difference[name].std():.3f})"
                for text, name in zip(shown, metrics, strict=True)
            ]
        lines.append(f"| {row} | " + " | ".join(shown) + " |")
    if ours is not None and {START, TRUTH} <= set(table["row"]):
        gaps = [gap_closed(keyed, name) for name in metrics[:2]]
        lines += [
            "",
            f"Of the gap from SimCLR to ground truth, ItS2CLR closes {gaps[0]} (bag AUC) and {gaps[1]} (instance).",
        ]
    return "\n".join(lines)


def gap_closed(keyed: pd.DataFrame, metric: str) -> str:
    start, ours, truth = (keyed.loc[row][metric].mean() for row in (START, OURS, TRUTH))
    return f"{(ours - start) / (truth - start):.0%}" if truth > start else "nothing, as there is none"


def draw_rates(table: pd.DataFrame, path: Path) -> None:
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, metric in zip(figure.subplots(1, 2), ["bag AUC", "instance AUC"], strict=True):
        for row, colour, marker in zip(BY_RATE, COLOURS, "so^D", strict=True):
            of_row = table[table["row"] == row].groupby("rate")[metric].agg(["mean", "std"])
            if len(of_row):
                deviation = of_row["std"].fillna(0)
                style = {"color": colour, "marker": marker, "capsize": 3}
                axes.errorbar(of_row.index, of_row["mean"], deviation, label=row, **style)
        axes.set(xscale="log", xlabel="witness rate", ylabel=f"test {metric}")
        rates = sorted(table["rate"].unique())
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def draw_rounds(runs: list[dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(1, 3), QUALITY.items(), strict=True):
        for row, colour, style in zip(CURVES, COLOURS, ("-", "--", ":"), strict=False):
            curves = [
                pd.Series({entry["epoch"]: entry.get(key, np.nan) for entry in one["rounds"]})
                for one in runs
                if one["row"] == row and one["rate"] == 0.1
            ]
            if curves:
                joined = pd.concat(curves, axis=1)
                mean, deviation = joined.mean(axis=1), joined.std(axis=1).fillna(0)
                axes.plot(mean.index, mean, color=colour, linestyle=style, label=row)
                axes.fill_between(mean.index, mean - deviation, mean + deviation, color=colour, alpha=0.15, linewidth=0)
        axes.set(title=title, xlabel="epoch")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def draw_cells(run: Path, aggregator: str, path: Path) -> None:
    scores = RunScores(run)
    test: Cohort = scores.cohort.split("test")
    model = Model(scores.best.encoder, aggregator)
    ranked = []
    for bag_id in test.bags["bag_id"]:
        bag = scores.bag(bag_id, model)
        ranked += [(score, bag_id, number) for number, score in enumerate(bag.instances)]
    ranked.sort(reverse=True)
    figure = Figure(figsize=(12, 5), layout="constrained")
    panels = figure.subfigures(2, 1)
    for panel, title, some in zip(panels, ("highest", "lowest"), (ranked[:SHOWN], ranked[-SHOWN:]), strict=True):
        panel.suptitle(f"{title} ranked", fontsize=10)
        for axes, (score, bag_id, number) in zip(panel.subplots(2, SHOWN // 2).flat, some, strict=True):
            tiles = test.tile_file(bag_id)
            axes.imshow(decode(tiles.encoded(number)))
            axes.set_title(f"{score:.2f}", fontsize=7, pad=2)
            axes.set(xticks=[], yticks=[])
            infected = tiles.labels is not None and tiles.labels[number] == 1
            for spine in axes.spines.values():
                spine.set(color="#D55E00" if infected else "0.8", linewidth=2.5 if infected else 0.5)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)

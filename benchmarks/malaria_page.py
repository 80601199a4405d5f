"""Make docs/results-real.md from what benchmarks/malaria.py found on test and validation patients.

    python benchmarks/malaria_page.py docs [RUN]

It reads benchmarks/results/: malaria.json and malaria_validation.json, the same of earlier settings
(malaria_first.json, malaria_first_validation.json), malaria_readers.json, malaria_plain.json and classic_mil.json. What
the page says before the tables is docs/results-real/lead.md, written by hand. RUN is the folder of one run, whose
highest and lowest ranked test cells are drawn; without it the picture stays as it is.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from its2clr.cohort import Cohort
from its2clr.cohort.tiles import decode
from its2clr.files import read_json
from its2clr.run.scores import Model, RunScores

CLASSIC = (
    "Accuracy in ten-fold cross-validation, repeated, mean ± deviation over repeats (`benchmarks/classic_mil.py`). "
    "*Last*: the last epoch at a probability of 0.5. *Chosen on test*: epoch and threshold that are best on the test "
    "fold, as the published code of DS-MIL takes them; too good by construction, and the one to hold against DS-MIL's "
    "published numbers. Hold *last* against attention-MIL's."
)
RESULTS = Path(__file__).parent / "results"
AGGREGATOR = "dsmil"
METRICS = ["bag AUC", "instance AUC", "instance AUPRC"]
SCORED = "bags and instances by DS-MIL, the mean score of five trainings of it. Mean ± deviation over runs"
EXPLAINED = (
    f"{SCORED}; in brackets the mean of ItS2CLR minus the row, run by run, and in how many runs ItS2CLR is ahead."
)
OTHERS = (
    "Witness rate 0.1, **validation** patients: what was compared before the recipe became what it is, by what differs "
    "from it. *Whole cells*: views in refinement that are not cropped; *tolerance*, *selection by contrast*: settings "
    "that were removed since, as they did not help;"
)
FIRST = (
    "An earlier state of the recipe: refinement with learning rate 0.03, 30 epochs, whole cells, pacing 0.2 to 0.8 "
    "and no tolerance. **Test** patients, bag AUC / instance AUC by DS-MIL."
)
READ_BY = (
    "Test patients at witness rate 0.1, mean over runs: bag AUC / instance AUC / instance AUPRC of the same frozen "
    "encoders by DS-MIL, and by the smooth maximum that made the pseudo labels."
)
READERS = (
    "The paper takes pseudo labels from one aggregator, the run's own, at a fixed threshold. What the switches beyond "
    "that do to the first pseudo labels, on the frozen SimCLR features of one start (its weights were "
    "kept in half precision): "
    "mean ± deviation over five repeats with aggregators of other seeds. Precision and recall are of the "
    "pseudo-positives among training instances."
)
READ = (
    ("instance AUC", "instance_auc"),
    ("precision", "precision"),
    ("recall", "recall"),
    ("F1", "f1"),
    ("validation bag AUC", "validation_auc"),
)
PLAIN = (
    "The paper's views, temperature 0.07, DS-MIL without dropout, one aggregator and the threshold 0.3, on sampling 0 "
    "(`benchmarks/malaria_plain.yaml`; one run). It does not get through refinement. What its user "
    "reads in the terminal and in the report, with no ground truth used:"
)
FIRST_ROUND = (
    ("instances of negative bags scored positive", "false_positive_share"),
    ("validation bag AUC", "validation_auc"),
    ("AUC of how far a training bag's top instance stands out", "contrast_auc"),
    ("instance AUC (needs ground truth)", "instance_auc"),
    ("precision of the pseudo-positives (needs ground truth)", "precision"),
    ("recall (needs ground truth)", "recall"),
)
START, OURS, TRUTH, CROSS_ENTROPY = "SimCLR", "ItS2CLR", "Ground-truth finetuning", "Cross-entropy"
BY_RATE = (START, OURS, CROSS_ENTROPY, TRUTH)
CURVES = (OURS, CROSS_ENTROPY)
QUALITY = {"instance_auc": "instance AUC", "precision": "precision of selected", "recall": "recall of selected"}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
SHOWN = 30


def main(docs: Path, run: Path | None) -> None:
    found, on_validation = results("malaria"), results("malaria_validation")
    folder = docs / "results-real"
    table = flat(found["runs"])
    parts = ["# On real bags", (folder / "lead.md").read_text(encoding="utf-8").strip()]
    for rate, of_rate in table.groupby("rate"):
        explained = f"Test patients; {EXPLAINED}"
        parts += [f"## Witness rate {rate:g}", explained, rows_table(of_rate), gap_sentence(of_rate)]
    draw_rates(table, folder / "rates.png")
    parts.append("## Over witness rates\n\n![Test AUC over witness rates](results-real/rates.png)")
    parts.append(aggregators_section(found["runs"]))
    parts += [f"## Other settings\n\n{OTHERS} {EXPLAINED}", rows_table(flat(on_validation["runs"]))]
    parts.append(readers_section(results("malaria_readers")))
    draw_rounds(found["runs"], folder / "rounds.png")
    parts.append(
        "## Pseudo labels, round by round\n\nOn the training instances at witness rate 0.1, mean and deviation over "
        "all runs.\n\n![Instance AUC, precision and recall of the pseudo labels](results-real/rounds.png)"
    )
    if run is not None:
        draw_cells(run, folder / "cells.png")
    if (folder / "cells.png").is_file():
        parts.append(
            f"## Highest and lowest ranked cells\n\nTest patients of one run of ItS2CLR, {SHOWN} of each; framed: "
            "infected by the ground truth.\n\n![Highest and lowest ranked cells](results-real/cells.png)"
        )
    parts.append(plain_section(results("malaria_plain"), found["runs"]))
    parts.append(classic_section(results("classic_mil")))
    first = flat(results("malaria_first")["runs"])
    parts += [f"## Earlier settings\n\n{FIRST}", over_rates(first)]
    parts += [f"The same settings and others on **validation** patients; {SCORED}. Rows of few runs are of other runs."]
    parts.append(rows_table(flat(results("malaria_first_validation")["runs"]), beside_ours=False))
    (docs / "results-real.md").write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")


def results(name: str) -> dict[str, Any]:
    return dict(read_json(RESULTS / f"{name}.json"))


def flat(runs: list[dict[str, Any]], aggregator: str = AGGREGATOR) -> pd.DataFrame:
    """One row per run: bags and instances by one aggregator, as a rule the run's own."""
    return pd.DataFrame(
        [
            {
                **{key: one[key] for key in ("rate", "row", "sampling", "training")},
                "bag AUC": one["aggregators"][aggregator]["bag_auc"],
                "instance AUC": one["aggregators"][aggregator]["instance_auc"],
                "instance AUPRC": one["aggregators"][aggregator]["instance_auprc"],
            }
            for one in runs
        ]
    )


def rows_table(table: pd.DataFrame, *, beside_ours: bool = True) -> str:
    """Mean and deviation of every row, and the difference to ItS2CLR run by run."""
    keyed = table.set_index(["row", "sampling", "training"])[METRICS]
    ours = keyed.loc[OURS]
    lines = ["| | runs | " + " | ".join(METRICS) + " |", "|---" * (len(METRICS) + 2) + "|"]
    for row in table["row"].unique():
        own = keyed.loc[row]
        shown = [f"{own[name].mean():.3f} ± {own[name].std(ddof=0):.3f}" for name in METRICS]
        if row != OURS and beside_ours:
            difference = (ours - own).dropna()
            shown = [
                f"{text} ({difference[name].mean():+.3f}, {(difference[name] > 0).sum()}/{len(difference)})"
                for text, name in zip(shown, METRICS, strict=True)
            ]
        lines.append(f"| {row} | {len(own)} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def gap_sentence(table: pd.DataFrame) -> str:
    """Share of the gap that ItS2CLR and cross-entropy close, and how it differs between samplings of the patients."""
    shared = common(table)
    said = [f"{row} closes {percent(shared, row)}" for row in (OURS, CROSS_ENTROPY)]
    by_sampling = [f"{percent(some, OURS)} in sampling {number}" for number, some in shared.groupby("sampling")]
    runs = (shared["row"] == OURS).sum()
    return (
        f"Of the gap from SimCLR to ground truth (bag AUC / instance AUC, {runs} runs that all rows have), "
        f"{', '.join(said)}. ItS2CLR closes {', '.join(by_sampling)}."
    )


def common(table: pd.DataFrame) -> pd.DataFrame:
    """The runs that all four main rows have."""
    main_rows = table[table["row"].isin(BY_RATE)]
    counts = main_rows.groupby(["sampling", "training"])["row"].transform("nunique")
    return main_rows[counts == len(BY_RATE)]


def percent(table: pd.DataFrame, row: str) -> str:
    means = table.groupby("row")[METRICS].mean()
    closed = (means.loc[row] - means.loc[START]) / (means.loc[TRUTH] - means.loc[START])
    return f"{closed['bag AUC']:.0%} / {closed['instance AUC']:.0%}"


def over_rates(table: pd.DataFrame) -> str:
    """Bag and instance AUC of every row by witness rate, and the share of the gap that ItS2CLR closes."""
    lines = ["| witness rate | runs | " + " | ".join(BY_RATE) + " | gap closed by ItS2CLR |", "|---" * 7 + "|"]
    for rate, some in table.groupby("rate"):
        means = some.groupby("row")[METRICS].mean()
        shown = [f"{means.loc[row, 'bag AUC']:.3f} / {means.loc[row, 'instance AUC']:.3f}" for row in BY_RATE]
        runs = (some["row"] == OURS).sum()
        lines.append(f"| {rate:g} | {runs} | " + " | ".join(shown) + f" | {percent(common(some), OURS)} |")
    return "\n".join(lines)


def aggregators_section(runs: list[dict[str, Any]]) -> str:
    """The same encoders as another aggregator reads them."""
    at_rate = [one for one in runs if one["rate"] == 0.1]
    tables = {name: flat(at_rate, name).groupby("row", sort=False)[METRICS].mean() for name in ("dsmil", "smooth_max")}
    lines = ["## Read by another aggregator", "", READ_BY, ""]
    lines += ["| | DS-MIL | smooth maximum |", "|---|---|---|"]
    for row in BY_RATE:
        shown = [" / ".join(f"{table.loc[row, name]:.3f}" for name in METRICS) for table in tables.values()]
        lines.append(f"| {row} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def readers_section(found: dict[str, Any]) -> str:
    """Pseudo labels of the start by how they are read."""
    lines = ["## Readers of the start", "", READERS, ""]
    lines += ["| | " + " | ".join(name for name, _ in READ) + " |", "|---" * (len(READ) + 1) + "|"]
    for row, measured in found["rows"].items():
        shown = []
        for _, key in READ:
            values = [one[key] for one in measured]
            shown.append(f"{np.mean(values):.3f} ± {np.std(values):.3f}")
        lines.append(f"| {row} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def plain_section(found: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    """What a plain attempt is told beside what ground truth says, and the recipe's first round."""
    same = {"row": OURS, "rate": 0.1, "sampling": 0}
    ours = [one["rounds"][0] for one in runs if same.items() <= one.items()]
    lines = ["## What a plain attempt is told", "", PLAIN, ""]
    lines += ["\n>\n".join(f"> {sentence}" for sentence in (found["stopped"], *found["warnings"]) if sentence), ""]
    lines += [f"| first round | plain attempt | this recipe, mean of {len(ours)} runs |", "|---|---|---|"]
    for name, key in FIRST_ROUND:
        lines.append(f"| {name} | {found['rounds'][0][key]:.3f} | {np.mean([one[key] for one in ours]):.3f} |")
    return "\n".join(lines)


def classic_section(found: dict[str, Any]) -> str:
    """Accuracies of aggregators alone beside the published ones."""
    lines = ["## Aggregators alone, on classic features", "", CLASSIC, ""]
    lines += ["| | repeats | last | chosen on test | published |", "|---|---|---|---|---|"]
    for name, one in found["results"].items():
        shown = ["{:.3f} ± {:.3f}".format(*one[kind]) for kind in ("last", "chosen on test", "published")]
        lines.append(f"| {name} | {one['repeats']} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def deviation_of(values: pd.Series) -> float:
    """Deviation over runs, as in the tables."""
    return float(values.std(ddof=0))


def draw_rates(table: pd.DataFrame, path: Path) -> None:
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, metric in zip(figure.subplots(1, 2), ["bag AUC", "instance AUC"], strict=True):
        for row, colour, marker in zip(BY_RATE, COLOURS, "so^D", strict=True):
            of_row = table[table["row"] == row].groupby("rate")[metric].agg(["mean", deviation_of])
            if len(of_row):
                deviation = of_row["deviation_of"]
                style = {"color": colour, "marker": marker, "capsize": 3}
                axes.errorbar(of_row.index, of_row["mean"], deviation, label=row, **style)
        axes.set(xscale="log", xlabel="witness rate", ylabel=f"test {metric}")
        rates = sorted(table["rate"].unique())
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
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
                mean, deviation = joined.mean(axis=1), joined.std(axis=1, ddof=0)
                axes.plot(mean.index, mean, color=colour, linestyle=style, label=row)
                axes.fill_between(mean.index, mean - deviation, mean + deviation, color=colour, alpha=0.15, linewidth=0)
        axes.set(title=title, xlabel="epoch")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def draw_cells(run: Path, path: Path) -> None:
    scores = RunScores(run)
    test: Cohort = scores.cohort.split("test")
    model = Model(scores.best.encoder, AGGREGATOR)
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
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)

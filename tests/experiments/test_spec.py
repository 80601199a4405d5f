"""The specs: every table and figure of the paper is there, with the paper's numbers, and says where ours come from."""

import re
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from its2clr.aggregators import aggregator_names
from its2clr.errors import InputError
from its2clr.experiments.metrics import metric_names
from its2clr.experiments.spec import Cell, Experiment, datasets, experiments, methods, read_budget, select, starts
from its2clr.settings import resolve_config

LABELS = {
    "tab:calsscollision", "tab:mainresult", "tab:aggregator_results", "tab:instance_test", "tab:e2e_comp",
    "tab:WR_exp", "tab:diffpretrained_bag", "tab:diffpretrained_ins", "Table:hyperparameter", "tab:instance_test2",
    "tab:instance_test3", "tab:e2eappen", "tab:ultrasound", "fig:training_process", "fig:sampling_stra",
    "fig:localization", "fig:example_us", "fig:wholeset", "fig:ablation_1", "fig:ablation_2", "fig:pseudolabelf1",
    "fig:pseudolabelCE", "fig:pseudolabelpr", "fig:e2etraining", "fig:more_loc_maps",
}  # fmt: skip
"""Every label of a table or figure in the paper's source (tab:diffpretrained holds its two subtables)."""


def test_every_table_and_figure_of_the_paper_is_there():
    assert set(experiments()) >= LABELS
    assert all(spec.paper for spec in experiments().values() if spec.kind == "table")


@pytest.mark.parametrize("spec", experiments().values(), ids=lambda spec: spec.label)
def test_every_cell_says_where_its_number_comes_from(spec):
    for place, cell in spec.cells().items():
        assert cell.dataset in datasets()
        assert cell.missing is None, place
        assert cell.method in methods(), place
        assert cell.start is None or cell.start in starts(), place
        if spec.kind == "table":
            assert (cell.metric in metric_names()) != (cell.setting is not None), place
        assert cell.aggregator is None or cell.aggregator in aggregator_names()
    for sweep in spec.sweeps.values():
        value = resolve_config()
        for part in sweep.setting.split("."):
            value = getattr(value, part)
        assert value in sweep.values  # the paper's own choice is one of the points


@pytest.mark.parametrize(
    ("label", "row", "column", "mean", "std"),
    [
        ("tab:mainresult", "ItS2CLR", "STK11", 75.08, None),
        ("tab:aggregator_results", "Attention-MIL", "ItS2CLR w/o SPL", 86.20, 3.25),
        ("tab:aggregator_results", "Transformer", "CE iter.", 92.13, 1.07),
        ("tab:instance_test", "Dice", "Ground-truth finetuning", 62.17, None),
        ("tab:instance_test2", "F1-score", "ItS2CLR w/o both", 86.77, None),
        ("tab:instance_test3", "AUPRC", "CE iter.", 78.02, None),
        ("tab:instance_test3", "Bag AUC (max-pooling)", "ItS2CLR", 97.47, None),
        ("tab:WR_exp", "33% Pos.", "ItS2CLR", 86.02, None),
        ("tab:e2e_comp", "End-to-end", "Ultrasound bag AUPRC", 58.73, None),
        ("tab:e2eappen", "Instance AUC", "End-to-end (SimCLR)", 81.29, None),
        ("tab:ultrasound", "Instance AUPRC", "SimCLR + Aggregator", 10.58, None),
        ("tab:calsscollision", "ItS2CLR", "Test deviation neg", 0.847, None),
        ("tab:diffpretrained_ins", "Finetuned", "DINO (ViT) F-score", 0.806, None),
        ("Table:hyperparameter", "p_+", "EGFR", 0.5, None),
    ],
)
def test_the_papers_numbers(label, row, column, mean, std):
    spec = experiments()[label]
    number = spec.paper[row][list(spec.columns).index(column)]
    assert (number.mean, number.std) == (mean, std)


@pytest.mark.parametrize("name", ["smoke", "quick", "paper"])
def test_budgets_resolve(name):
    budget = read_budget(name)
    resolve_config(budget.recipe, budget.values)
    assert budget.starts.keys() <= starts().keys()
    for start, values in starts().items():
        resolve_config(budget.recipe, {**budget.values, **values, **budget.starts.get(start, {})})


def test_names():
    assert [spec.label for spec in select(["tab:diffpretrained"])] == [
        "tab:diffpretrained_bag",
        "tab:diffpretrained_ins",
    ]
    assert len(select(["all"])) == len(experiments())
    with pytest.raises(InputError, match="did you mean 'tab:mainresult'\\? `its2clr"):
        select(["tab:mainresults"])
    with pytest.raises(InputError, match="no table or figure 'zzz'; `its2clr"):
        select(["zzz"])


def test_a_row_and_a_column_may_not_contradict():
    assert Cell(metric="bag_auc").with_(Cell(metric="witness_rate")).metric == "witness_rate"
    with pytest.raises(ValueError, match="two values for method"):
        Cell().with_(Cell(method="simclr"), Cell(method="its2clr"))


def test_a_table_without_the_papers_number_is_refused():
    values = experiments()["tab:mainresult"].model_dump()
    values["paper"]["ItS2CLR"] = values["paper"]["ItS2CLR"][:-1]
    with pytest.raises(ValidationError, match="5 numbers for 6 columns"):
        Experiment.model_validate(values)


def test_a_table_of_ones_own_is_a_file(tmp_path):
    (own,) = select([str(Path(__file__).parents[2] / "benchmarks" / "ablations.yaml")])
    assert own.label == "ablations"
    assert len(own.cells()) == 6
    values = yaml.safe_load(own.model_dump_json(exclude={"paper"}, exclude_defaults=True))
    without = tmp_path / "mine.yaml"
    without.write_text(yaml.safe_dump(values))
    assert [spec.label for spec in select([str(without), "tab:WR_exp"])] == ["ablations", "tab:WR_exp"]


NO_TABLES = {
    "Input should be|should match": {"label": "../out"},
    "colour": {"colour": "red"},
    "A, B: no method named 'nobody'": {"rows": {"A": {"method": "nobody"}}},
    "A, B: no metric named 'bag_acu', did you mean 'bag_auc'": {"cell": {"metric": "bag_acu"}},
    "A, B: names no metric": {"cell": {}},
    "A, B: names no method": {"rows": {"A": {}}},
    "no group named 'cohort'": {"columns": "cohort"},
    "two values for method": {"columns": {"B": {"method": "its2clr"}}},
}


@pytest.mark.parametrize("said", NO_TABLES)
def test_a_file_that_holds_no_table_is_said(said, tmp_path):
    path = tmp_path / "mine.yaml"
    values = {"label": "mine", "title": "x", "kind": "table", "paper_data": "x", "cell": {"metric": "bag_auc"}}
    table = {"rows": {"A": {"method": "simclr"}}, "columns": {"B": {}}, **values}
    path.write_text(yaml.safe_dump(table))
    select([str(path)])
    path.write_text(yaml.safe_dump(table | NO_TABLES[said]))
    with pytest.raises(InputError, match=rf"(?s){re.escape(str(path))}: .*({said})"):
        select([str(path)])
    with pytest.raises(InputError, match="no file"):
        select([str(tmp_path / "none.yaml")])

"""What `reproduce --budget paper` would run, beside the paper's numbers, typed from its text."""

import pytest
import yaml
from typer.testing import CliRunner

from its2clr.cli.program import app
from its2clr.experiments.plan import Planner
from its2clr.experiments.spec import Cell, datasets, experiments, read_budget

VIEWS = {  # "random (p=0.8) color jittering: ... [0.2, 1.8], hue ... [-0.2, 0.2]", grayscale (p=0.2), blur, flips
    "jitter_probability": 0.8,
    "brightness": 0.8,
    "contrast": 0.8,
    "saturation": 0.8,
    "hue": 0.2,
    "grayscale_probability": 0.2,
    "blur_kernel": 0.06,
    "horizontal_flip": 0.5,
    "vertical_flip": 0.5,
}
ALL = {
    "encoder.name": "resnet18",  # "ResNet18 ... a 512-dimensional vector"
    "pretrain.method": "simclr",
    "pretrain.batch_size": 512,  # "We set the batch size to 512 and temperature to 0.5."
    "pretrain.temperature": 0.5,
    "pretrain.optimiser": "sgd",  # "SGD with the learning rate of 0.03, weight decay of 0.0001, and cosine annealing"
    "pretrain.learning_rate": 0.03,
    "pretrain.weight_decay": 0.0001,
    "pretrain.schedule": "cosine",
    "aggregator.bags_per_step": 1,  # "set the batch size to just one bag"
    "evaluation.retrainings": 5,  # "We retrain each aggregator 5 times"
    "refine.epochs": 50,  # "for a maximum of 50 epochs"
    "refine.batch_size": 512,  # "The batch size is set to 512, and the learning rate is set to 10^-2"
    "refine.learning_rate": 0.01,
    "refine.objective": "supervised_contrastive",
    "refine.labels": "pseudo",
    "refine.iterative": True,
    "refine.self_paced": True,
    "refine.warmup_anchors": "negative",  # "we sample anchor instances x only from X-neg"
    "refine.gate": "auc",  # Algorithm 1, line 11
    "refine.relabel": "improved",
    "refine.top_instance": False,  # line 13
    "refine.threshold_rule": "fixed",
    "refine.aggregator_seeds": 1,
    "refine.out_of_fold": False,
    "refine.pseudo_negatives": 1.0,
    "refine.reader": None,
    "refine.hand_over": "refined",
    "refine.initial_ratio": 0.2,  # Table:hyperparameter, the same for every dataset
    "refine.final_ratio": 0.8,
    **{f"refine.views.{name}": value for name, value in VIEWS.items()},
}
DSMIL = {"aggregator.name": "dsmil", "aggregator.learning_rate": 2e-4, "aggregator.scheduler": "step"}
# "StepLR ... by 0.5 every 75 epochs", "a maximum of 350 epochs"
CAMELYON16 = {**DSMIL, "aggregator.epochs": 350, "aggregator.step_size": 75, "aggregator.gamma": 0.5}
# "a maximum of 100 epochs ... divide the learning rate by 2 every 50 epochs", "keep the class ratio balanced"
TCGA = {
    **DSMIL,
    "pretrain.epochs": 600,
    "aggregator.epochs": 100,
    "aggregator.step_size": 50,
    "aggregator.gamma": 0.5,
    "aggregator.balanced": True,
}
PAPER = {
    "camelyon16": {
        **CAMELYON16,
        "pretrain.epochs": 600,
        "aggregator.balanced": False,
        "refine.threshold": 0.3,
        "refine.positive_fraction": 0.2,
    },
    "breast-ultrasound": {
        "pretrain.epochs": 100,  # "pretrained it using SimCLR for 100 epochs"
        "aggregator.name": "instance_attention",
        "aggregator.learning_rate": 1e-3,  # "Adam with a learning rate set to 10^-3 for a maximum of 350 epochs"
        "aggregator.epochs": 350,
        "aggregator.balanced": False,
        "refine.threshold": 0.3,
        "refine.positive_fraction": 0.2,
    },
    "tcga-egfr": {**TCGA, "refine.threshold": 0.3, "refine.positive_fraction": 0.5},
    "tcga-kras": {**TCGA, "refine.threshold": 0.5, "refine.positive_fraction": 0.2},
    "tcga-stk11": {**TCGA, "refine.threshold": 0.3, "refine.positive_fraction": 0.2},
    "tcga-tp53": {**TCGA, "refine.threshold": 0.5, "refine.positive_fraction": 0.2},
}
CHANGED = {  # what makes a row another method or start than the paper's own
    "its2clr_without_iteration": {"refine.iterative"},
    "its2clr_without_self_pacing": {"refine.self_paced"},
    "its2clr_without_both": {"refine.iterative", "refine.self_paced"},
    "its2clr_positive_warm_up": {"refine.warmup_anchors"},
    "cross_entropy": {"refine.objective", "refine.self_paced"},
    "cross_entropy_without_iteration": {"refine.objective", "refine.self_paced", "refine.iterative"},
    "ground_truth": {"refine.labels"},
}
SWEPT = {"refine.threshold", "refine.positive_fraction", "refine.initial_ratio", "refine.final_ratio"}


def plan(*names, budget="paper"):
    """Every cell of some tables, as `--plan` prints it, with the settings of all cells filled in."""
    found = CliRunner().invoke(app, ["reproduce", *names, "--budget", budget, "--plan"])
    assert found.exit_code == 0, found.output
    return {
        (label, name): {**table["all cells"], **cell}
        for label, table in yaml.safe_load(found.output).items()
        for name, cell in table["cells"].items()
    }


@pytest.fixture(scope="module")
def cells():
    return plan("all")


def test_every_cell_of_every_table_has_the_papers_settings(cells):
    seen = set()
    for (label, name), cell in cells.items():
        if "method" not in cell:
            assert "missing" in cell or experiments()[label].kind in {"drawing", "examples"}
            continue
        expected = {**ALL, **PAPER[cell["dataset"]]}
        free = CHANGED.get(cell["method"], set()) | (SWEPT if experiments()[label].kind == "sweep" else set())
        if cell.get("start") is not None:  # the paper gives no settings of its other starts
            free |= {key for key in expected if key.startswith(("pretrain.", "encoder."))}
        if cell["stage"] != "refine":
            free |= {key for key in expected if key.startswith("refine.")}
        if cell["method"] == "end_to_end_from_scratch":
            free |= {key for key in expected if key.startswith("pretrain.")}
        wrong = {key: cell.get(key) for key, value in expected.items() if key not in free and cell.get(key) != value}
        assert not wrong, f"{label}, {name}"
        seen.add(cell["dataset"])
    assert seen == set(PAPER) == set(datasets())


def test_the_pretraining_is_selected_by_validation(cells):
    """Appendix A.2: "we train a MIL aggregator ... and evaluate the bag-level prediction every few epochs"."""
    for dataset in PAPER:
        every = {cell["pretrain.check_every"] for cell in cells.values() if cell.get("dataset") == dataset}
        assert all(0 < number <= 10 for number in every)


def test_a_checked_pretraining_has_the_datasets_own_aggregator():
    planner = Planner(read_budget("paper"), {"": "cohort"}, None, {})
    starts = {name: planner.job(Cell(method="its2clr", dataset=name), 0).start for name in PAPER}
    for name, start in starts.items():
        assert planner.config(start).aggregator.name == PAPER[name]["aggregator.name"]
        assert planner.config(start).aggregator.epochs == PAPER[name]["aggregator.epochs"]
    assert starts["tcga-egfr"] == starts["tcga-kras"] != starts["camelyon16"]
    unchecked = Planner(read_budget("paper"), {"": "cohort"}, None, {"pretrain.check_every": 0})
    one, other = (unchecked.job(Cell(method="its2clr", dataset=name), 0).start for name in ("tcga-egfr", "camelyon16"))
    assert one == other


def test_other_budgets_take_the_aggregator_and_the_table_of_a_dataset_only():
    cells = plan("tab:mainresult", budget="quick")
    columns = {"Camelyon16": "camelyon16", "Breast Ultrasound": "breast-ultrasound", "KRAS": "tcga-kras"}
    for name, dataset in columns.items():
        cell = cells["tab:mainresult", f"ItS2CLR, {name}"]
        for key in ("aggregator.name", "aggregator.balanced", "refine.threshold", "refine.positive_fraction"):
            assert cell[key] == PAPER[dataset][key]
        assert (cell["pretrain.epochs"], cell["aggregator.epochs"]) == (4, 50)


def test_a_plan_needs_no_cohort_and_trains_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan("tab:mainresult")
    assert not any(tmp_path.iterdir())


def test_a_dataset_without_a_cohort_is_said():
    arguments = ["reproduce", "tab:mainresult", "--budget", "paper", "--plan", "--cohort", "tcga-egfr=somewhere"]
    table = yaml.safe_load(CliRunner().invoke(app, arguments).output)["tab:mainresult"]["cells"]
    assert table["ItS2CLR, KRAS"] == {"missing": "no cohort given for tcga-kras"}
    assert table["ItS2CLR, EGFR"]["method"] == "its2clr"

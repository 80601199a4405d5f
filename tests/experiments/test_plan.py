"""What is shared is run once: the same training, asked for by several cells, is one job."""

import re
import shutil
from pathlib import Path

import h5py
import pytest
import yaml
from tests.viewer.viewer_runs import write_cohort

from its2clr.cohort import tile_path
from its2clr.config import DinoConfig
from its2clr.errors import InputError
from its2clr.experiments.plan import Planner
from its2clr.experiments.spec import Cell, Resampling, experiments, read_budget, starts
from its2clr.settings import flatten, resolve_config

ROOT = Path(__file__).parents[2]
COHORT = {"": Path("/cohorts/mine")}


@pytest.fixture
def planner():
    return Planner(read_budget("smoke"), COHORT, None, {})


def test_a_sweeps_default_is_the_method_itself(planner):
    plain = planner.job(Cell(method="its2clr"), 0)
    assert planner.job(Cell(method="its2clr", values={"refine.threshold": 0.3}), 0) == plain
    assert planner.job(Cell(method="its2clr", values={"refine.threshold": 0.5}), 0) != plain
    assert planner.job(Cell(method="its2clr"), 1) != plain


def test_settings_that_a_stage_does_not_look_at_make_no_other_job(planner):
    plain = planner.job(Cell(method="simclr"), 0)
    assert planner.job(Cell(method="simclr", values={"refine.threshold": 0.9}), 0) == plain
    assert planner.job(Cell(method="simclr", dataset="breast-ultrasound"), 0) != plain  # another aggregator


def test_every_job_starts_from_one_pretraining(planner):
    cells = [cell for spec in experiments().values() for cell in spec.cells().values()]
    jobs = planner.plan(cells, seeds=2)
    assert len({planner.name(job) for job in jobs}) * 2 == len(jobs)
    own = {job.start for job in jobs if job.start is not None and not job.start.values}
    assert sorted(start.seed for start in own) == [0, 1]
    others = {job.start for job in jobs if job.start is not None} - own
    assert len(others) == 2 * len(starts())  # the starts of tab:diffpretrained
    from_nothing = [job for job in jobs if job.start is None]
    assert {(job.stage, job.settings.get("end_to_end.start")) for job in from_nothing} == {
        ("pretrain", None),
        ("end_to_end", "scratch"),
    }
    assert list(jobs)[: len(from_nothing)] == from_nothing


def test_a_start_is_run_though_no_cell_shows_it(planner):
    start, job = planner.plan([Cell(method="its2clr")], seeds=1)
    assert (start.stage, job.stage) == ("pretrain", "refine")
    assert planner.config(job).pretrain.start == str(planner.folder(start).absolute())
    assert planner.config(start).pretrain.start is None


def test_dino_has_its_authors_settings_at_the_papers_budget_as_the_guide_says():
    page = (ROOT / "docs" / "guide" / "starting-points.md").read_text(encoding="utf-8")
    (block,) = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "dino" in text]
    planner = Planner(read_budget("paper"), COHORT, None, {})
    found = planner.config(planner.job(Cell(method="its2clr", start="dino_vit"), 0).start)
    assert (found.pretrain, found.encoder.name, found.encoder.options) == (
        resolve_config("camelyon16", flatten(block)).pretrain,
        block["encoder"]["name"],
        block["encoder"]["options"],
    )
    assert found.pretrain.learning_rate == 0.0005 * found.pretrain.batch_size / 256


@pytest.mark.parametrize("budget", ["smoke", "quick"])
def test_dino_has_none_of_its_settings_for_long_trainings_at_smaller_budgets(budget):
    planner = Planner(read_budget(budget), COHORT, None, {})
    found = planner.config(planner.job(Cell(method="its2clr", start="dino_vit"), 0).start).pretrain
    assert found.views == planner.base.pretrain.views
    assert (found.learning_rate, found.weight_decay, found.weight_decay_end) == (0.0005, 0.04, None)
    assert (found.decay_biases, found.gradient_clip) == (True, None)
    small = ("hidden_dim", "bottleneck_dim", "output_dim", "local_views")
    assert found.dino == DinoConfig(**{name: getattr(found.dino, name) for name in small})
    assert found.dino.output_dim <= 512


def test_another_encoder_is_another_start(planner):
    plain = planner.job(Cell(method="its2clr"), 0)
    other = planner.job(Cell(method="its2clr", values={"pretrain.epochs": 7}), 0)
    assert planner.config(other.start).pretrain.epochs == 7
    assert planner.name(other.start) != planner.name(plain.start)
    assert planner.name(other) != planner.name(plain)


def test_a_named_start_is_trained_as_the_budget_says(planner):
    job = planner.job(Cell(method="its2clr", start="dino_vit"), 0)
    config = planner.config(job.start)
    assert (config.pretrain.method, config.pretrain.optimiser, config.pretrain.epochs) == ("dino", "adamw", 1)
    assert config.encoder.name == planner.config(job).encoder.name == "vit_small_patch16_224"
    assert planner.job(Cell(method="simclr", start="dino_vit"), 0).start == job.start
    drawn = planner.config(planner.job(Cell(method="its2clr", start="random"), 0).start)
    assert (drawn.pretrain.method, drawn.pretrain.epochs) == ("simclr", 0)
    supervised = planner.config(planner.job(Cell(method="its2clr", start="supervised"), 0).start)
    assert (supervised.pretrain.method, supervised.encoder.pretrained) == ("bag_labels", False)
    supervised = Planner(read_budget("paper"), COHORT, None, {}).job(Cell(method="its2clr", start="supervised"), 0)
    assert supervised.start.settings == {"encoder.norm": "batch", "encoder.pretrained": True, "pretrain.epochs": 0}


def test_the_user_may_train_a_start_longer_but_not_make_it_another():
    planner = Planner(read_budget("smoke"), COHORT, None, {"pretrain.epochs": 9, "pretrain.method": "simclr"})
    config = planner.config(planner.job(Cell(method="its2clr", start="byol"), 0).start)
    assert (config.pretrain.method, config.pretrain.epochs) == ("byol", 9)


def name(overrides=None, budget="smoke", recipe=None, method="its2clr", cohort=COHORT, start=False, **cell):
    planner = Planner(read_budget(budget), cohort, recipe, overrides or {})
    job = planner.job(Cell(method=method, **cell), 0)
    return planner.name(job.start if start else job)


def test_what_a_run_is_called_depends_on_all_it_is_made_of():
    assert name() == name()
    assert name({"aggregator.epochs": 3}) != name()
    assert name({"pretrain.epochs": 3}) != name()
    assert name(budget="quick") != name()
    assert name(recipe="demo") != name()
    assert name(cohort={"": Path("/cohorts/other")}) != name()
    assert name({"engine.accelerator": "cpu"}) == name()


def test_what_a_stage_does_not_look_at_does_not_change_its_name():
    assert name({"refine.epochs": 3}, method="simclr") == name(method="simclr")
    assert name({"refine.epochs": 3}, method="end_to_end") == name(method="end_to_end")
    for overrides in ({"aggregator.epochs": 3}, {"refine.threshold": 0.4}, {"evaluation.retrainings": 7}):
        assert name(overrides, start=True) == name(start=True)
    assert name({"pretrain.epochs": 3}, start=True) != name(start=True)


@pytest.mark.parametrize("what", ["images", "labels", "bags.csv"])
def test_a_cohort_that_changed_is_another(tmp_path, what):
    cohort, other = tmp_path / "c", tmp_path / "other" / "c"  # the same name elsewhere
    write_cohort(cohort, [f"bag {number}" for number in range(6)])
    shutil.copytree(cohort, other)

    def names():
        planner = Planner(read_budget("smoke"), {"": cohort}, None, {})
        job = planner.job(Cell(method="its2clr", cohort="sub_bags"), 0)
        return {planner.folder(job), planner.folder(job.start), planner.resampled(job)}

    before = names()
    assert names() == before
    if what == "bags.csv":
        path = cohort / what
        path.write_text(path.read_text().replace("bag 4,0", "bag 4,1"))
    else:
        with h5py.File(tile_path(cohort, "bag 3"), "r+") as file:
            file[what][-20 if what == "images" else 0] ^= 1
    assert not names() & before
    assert name(cohort={"": other}) != name(cohort={"": cohort})


def test_what_is_measured_is_joined_over_cells(planner):
    cells = [Cell(method="its2clr", aggregator=name) for name in ("max", "dsmil")]
    cells.append(Cell(method="its2clr", metric="probe_auc"))
    needs = list(planner.plan(cells, seeds=1).values())[1]
    assert needs.aggregators == {None, "max"}
    assert needs.features


def test_another_cohort_for_a_dataset():
    planner = Planner(read_budget("smoke"), {"tcga-egfr": Path("/cohorts/egfr")}, None, {})
    assert planner.job(Cell(method="simclr", dataset="tcga-egfr"), 0).cohort == "/cohorts/egfr"
    with pytest.raises(InputError, match="no cohort given for camelyon16"):
        planner.job(Cell(method="simclr"), 0)
    assert planner.plan([Cell(method="simclr")], seeds=1) == {}
    with pytest.raises(InputError, match="no dataset named 'egfr'"):
        Planner(read_budget("smoke"), {"egfr": Path("/cohorts/egfr")}, None, {})


def test_the_users_settings_stand_above_the_datasets():
    planner = Planner(read_budget("smoke"), COHORT, None, {"refine.threshold": 0.45})
    job = planner.job(Cell(method="its2clr", dataset="tcga-kras"), 0)
    assert "refine.threshold" not in job.settings
    assert planner.setting(Cell(method="its2clr", dataset="tcga-kras", setting="refine.threshold")) == 0.45
    swept = planner.job(Cell(method="its2clr", values={"refine.threshold": 0.1}), 0)
    assert swept.settings == {"refine.threshold": 0.1}
    with pytest.raises(InputError, match="--seeds says how many"):
        Planner(read_budget("smoke"), COHORT, None, {"seed": 7})


def test_the_users_recipe_stands_above_the_dataset_all_cells_are_of(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("aggregator: {name: max}\nrefine: {threshold: 0.6}\n")
    planner = Planner(read_budget("smoke"), COHORT, str(recipe), {})
    config = planner.config(planner.job(Cell(method="its2clr"), 0))
    assert (config.aggregator.name, config.refine.threshold) == ("max", 0.6)
    config = planner.config(planner.job(Cell(method="its2clr", dataset="tcga-kras"), 0))
    assert (config.aggregator.name, config.refine.threshold) == ("dsmil", 0.5)  # the column says so


def test_methods_differ_by_what_they_name(planner):
    def settings(method):
        return planner.job(Cell(method=method), 0).settings

    assert settings("its2clr") == {}
    assert settings("its2clr_without_both") == {"refine.iterative": False, "refine.self_paced": False}
    assert settings("ground_truth") == {"refine.labels": "ground_truth"}
    assert settings("cross_entropy") == {"refine.objective": "cross_entropy", "refine.self_paced": False}
    resampled = planner.job(Cell(method="its2clr", cohort={"keep_positives": 0.5}), 0)
    assert resampled.resampling == Resampling(keep_positives=0.5)
    assert resampled.start == planner.job(Cell(method="its2clr"), 0).start

"""Trials, budgets, pruning and going on after a stop, with a stand-in for the training of a trial."""

import json
import math
from typing import ClassVar

import pytest
import yaml

from its2clr.errors import InputError, TrainingError
from its2clr.tune import search
from its2clr.tune.results import write_results
from its2clr.tune.search import Budget, tune, work
from its2clr.tune.study import Study

SPACE = {
    "refine.learning_rate": {"low": 0.001, "high": 0.3, "log": True},
    "refine.epochs": {"low": 4, "high": 8, "step": 2},
    "refine.temperature": [0.07, 0.2],
}
SETTINGS = ["refine.epochs=6", "refine.warmup_epochs=1", "refine.refresh_every=2"]


class FakeStages:
    """Rounds whose numbers depend on the settings alone; `before` may stop a trial or fail it."""

    before: ClassVar = None
    trained: ClassVar = []

    def __init__(self, folder, cohort, recipe, settings, **options):
        self.folder, self.config, self.run = folder, settings, self
        self.on_log = None

    def pretrain(self):
        FakeStages.trained.append(self.folder.name)

    def refine(self):
        config = self.config["refine"]
        for epoch in range(0, config["epochs"] + 1, 2):
            if FakeStages.before is not None:
                FakeStages.before(self, epoch)
            off = abs(math.log10(config["learning_rate"] / 0.05))
            loss = 0.7 if epoch == 0 else 0.4 - epoch / 100 + off / 10
            found = {"validation_loss": loss, "epoch": epoch, "improved": True}
            path = self.folder / "rounds" / f"{epoch:03d}" / "metrics.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found))
            self.on_log("refine", epoch)
            self.on_log("round", epoch)


@pytest.fixture
def begin(tiny_cohort, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "open_run", FakeStages)
    monkeypatch.setattr(FakeStages, "before", None)
    monkeypatch.setattr(FakeStages, "trained", [])
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(SPACE))

    def begun(name="study", *more):
        return Study.begin(tmp_path / name, tiny_cohort, "demo", [*SETTINGS, *more], tmp_path / "space.yaml")

    return begun


def facts(study):
    return [(found.number, found.state, found.value, found.rounds, found.settings) for found in study.trials()]


def test_the_first_trial_is_the_recipe_and_the_best_has_the_lowest_loss(begin):
    study = begin()
    best = tune(study, trials=6)
    trials = study.trials()
    assert [trial.number for trial in trials] == list(range(6))
    assert trials[0].settings == {"refine.learning_rate": 0.01, "refine.epochs": 6, "refine.temperature": 0.2}
    assert study.config_of(trials[0]) == study.config
    finished = [trial for trial in trials if trial.state == "finished"]
    assert best.value == min(trial.value for trial in finished) < trials[0].value
    assert len({json.dumps(trial.settings) for trial in trials}) == 6


def test_a_trial_worse_than_the_median_is_stopped_and_the_recipe_never(begin):
    study = begin("study", "refine.learning_rate=0.0001")  # worse than all that can be drawn
    tune(study, trials=9)
    trials = study.trials()
    stopped = [trial for trial in trials if trial.state == "stopped early"]
    assert stopped
    assert trials[0].state == "finished"
    assert all(trial.number >= 4 and trial.why == "worse than the median of the other trials" for trial in stopped)
    for trial in stopped:
        assert 2 <= trial.rounds < trial.settings["refine.epochs"] / 2 + 1  # the start is not judged
        others = [other for other in trials if other.number < trial.number]
        assert trial.value > min(other.value for other in others)
    assert study.best().state == "finished"


def test_a_stopped_study_goes_on_as_if_it_had_not_been_stopped(begin):
    whole, stopped = begin("whole"), begin("stopped")
    tune(whole, trials=6)

    def interrupt(stages, epoch):
        if stages.folder.name == "003" and epoch == 4:
            raise KeyboardInterrupt

    FakeStages.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        tune(stopped, trials=6)
    assert [found.state for found in stopped.trials()] == ["finished"] * 3 + ["unfinished"]
    assert (stopped.path / "best.yaml").is_file()
    FakeStages.before = None
    tune(begin("stopped"), trials=6)
    assert facts(stopped) == facts(whole)
    assert stopped.best() is not None


def test_a_trial_that_another_process_works_on_is_left_alone(begin):
    study = begin()
    mine, theirs = study.claim(), Study(study.path).claim()
    assert (mine.trial.number, theirs.trial.number) == (0, 1)
    mine.let_go()
    assert Study(study.path).claim().trial.number == 0
    theirs.let_go()


def test_a_trial_whose_process_is_killed_again_and_again_is_given_up(begin):
    study = begin()
    study.claim().let_go()
    for _ in range(2):
        claim = study.claim()
        assert claim.trial.number == 0
        claim.let_go()
    claim = study.claim()
    assert claim.trial.number == 1
    claim.let_go()
    assert study.trials()[0].state == "failed"
    assert "killed again and again" in study.trials()[0].why


def test_trials_are_counted_over_the_whole_study(begin):
    tune(begin(), trials=2)
    study = begin()
    tune(study, trials=3)
    tune(study, trials=3)
    assert len(study.trials()) == 3


def test_hours_end_a_trial_after_a_round(begin, monkeypatch):
    study = begin()
    clock = iter(range(100))
    monkeypatch.setattr(search.time, "time", lambda: next(clock))
    work(study, Budget(None, deadline=3), lambda: None)  # before the trial, after round 0, after round 1
    assert [(found.state, found.rounds) for found in study.trials()] == [("unfinished", 3)]
    monkeypatch.undo()
    assert tune(study, hours=0) is None


def test_hours_that_were_spent_count(begin):
    study = begin()
    stopwatch = study.stopwatch()
    stopwatch._started -= 3600
    stopwatch.note()
    assert study.seconds_spent() >= 3600
    tune(study, hours=1)
    assert not study.trials()
    tune(study, hours=2, trials=1)
    assert len(study.trials()) == 1


def test_a_collapse_is_learned_from_and_other_errors_are_rows(begin):
    study = begin()

    def trouble(stages, epoch):
        if stages.folder.name == "001" and epoch == 2:
            raise TrainingError("it collapsed")
        if stages.folder.name == "002":
            raise RuntimeError("no reason")

    FakeStages.before = trouble
    tune(study, trials=4)
    assert [(found.state, found.why) for found in study.trials()] == [
        ("finished", ""),
        ("stopped early", "it collapsed"),
        ("failed", "RuntimeError: no reason"),
        ("finished", ""),
    ]


def test_a_search_that_cannot_work_ends(begin):
    def fail(stages, epoch):
        raise RuntimeError("out of order")

    FakeStages.before = fail
    study = begin()
    with pytest.raises(TrainingError, match=r"first 3 trials all failed.*out of order"):
        tune(study, trials=50)
    assert len(study.trials()) == 3


def test_trials_share_a_start_unless_pretraining_is_searched(begin, tmp_path):
    tune(begin(), trials=3)
    assert len(set(FakeStages.trained)) == 1
    (tmp_path / "space.yaml").write_text("pretrain.temperature: {low: 0.1, high: 0.9}\n")
    FakeStages.trained.clear()
    study = begin("other")
    tune(study, trials=3)
    assert len(set(FakeStages.trained)) == 3
    assert study.config.pretrain.start is None


def test_other_settings_are_refused(begin, tmp_path, tiny_cohort):
    begin()
    with pytest.raises(InputError, match=r"refine\.momentum: 0\.9 -> 0.5"):
        begin("study", "refine.momentum=0.5")
    (tmp_path / "space.yaml").write_text(yaml.safe_dump({**SPACE, "refine.epochs": [4, 6]}))
    with pytest.raises(InputError, match=r"space of refine\.epochs"):
        begin()
    assert Study.begin(tmp_path / "study").space.written() == SPACE
    assert (
        Study.begin(tmp_path / "study", overrides=["engine.extract_batch_size=7"]).config.engine.extract_batch_size == 7
    )
    with pytest.raises(InputError, match="name a cohort"):
        Study.begin(tmp_path / "none")
    with pytest.raises(InputError, match="not a cohort"):
        Study.begin(tmp_path / "none", tmp_path)


def test_a_recipe_outside_the_space_is_still_the_first_trial(begin, tmp_path):
    (tmp_path / "space.yaml").write_text("refine.temperature: [0.5, 0.6]\nrefine.momentum: {low: 0.1, high: 0.2}\n")
    study = begin()
    tune(study, trials=2)
    assert study.trials()[0].settings == {"refine.temperature": 0.2, "refine.momentum": 0.9}
    assert study.trials()[1].settings["refine.temperature"] in {0.5, 0.6}


def test_the_page_says_what_was_gained_and_what_mattered(begin):
    study = begin()
    write_results(study)
    assert "None of 0 trials has finished" in (study.path / "report.html").read_text()
    tune(study, trials=3)
    assert "at least 4 trials must have finished" in (study.path / "report.html").read_text()
    best = tune(study, trials=8)
    page = (study.path / "report.html").read_text()
    assert f"Best of 8 trials: trial {best.number}" in page
    assert f"the recipe itself: {study.trials()[0].value:.4f}" in page
    assert "Test bags were never looked at" in page
    assert page.count('class="best"') == 1
    shares = study.importances()
    assert shares.keys() == set(SPACE)
    assert sum(shares.values()) == pytest.approx(1)
    assert page.count('class="share"') == 3
    assert "src=" not in page
    assert "http" not in page.replace("http-equiv", "")

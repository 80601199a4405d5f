"""What a fit says before it works: what it will do, on what, and how long, measured on its first steps."""

import pytest
from tests.conftest import TINY

from its2clr.cohort import Cohort
from its2clr.engine import progress
from its2clr.engine.progress import TotalWork
from its2clr.errors import InputError
from its2clr.run import work_plan
from its2clr.run.opening import open_run
from its2clr.run.work_plan import plan_work, said_duration


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_the_rest_takes_as_long_as_what_was_measured(clock):
    told = []
    work = TotalWork(100, lambda *found: told.append(found))
    work.begin()
    work.add(10)
    clock[0] = 60.0  # the first step makes everything ready, and is not measured
    work.begin()
    work.add(10)
    clock[0] = 64.0
    work.measure()
    assert told == []  # four seconds are too few
    work.add(10)
    clock[0] = 68.0
    work.measure()
    assert told == [(70 * 8 / 20, 20 / 8)]
    assert work.said() == "30% of all encoder training, 28s left"
    work.add(10)
    clock[0] = 80.0
    work.measure()
    assert len(told) == 1


def test_a_fit_does_what_its_plan_counts(tiny_cohort, tmp_path, monkeypatch):
    said = []
    stages = open_run(tmp_path / "run", tiny_cohort, "demo", TINY)
    monkeypatch.setattr(stages.engine, "say", said.append)
    made = []

    class Watched(TotalWork):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(work_plan, "TotalWork", Watched)
    stages.fit()
    train = Cohort.open(tiny_cohort).split("train")
    assert f"{len(train)} training bags" in said[0]
    assert "pretrain 2 epochs of " in said[1]
    assert "refine 4 epochs of " in said[1]
    assert any("of encoder training left, at " in line for line in said)
    (work,) = made
    assert work.done == work.total > 0  # the plan counts steps as the trainings do
    config, epochs = stages.config, [{"stage": "pretrain", "epoch": 2}, {"stage": "refine", "epoch": 1}]
    (left,) = plan_work(config, train.n_instances, stages.engine, pretrains=True, metrics=epochs)
    assert (left.stage, left.epochs, left.left) == ("refine", 4, 3)


def test_very_long_work_on_a_cpu_is_worth_a_question(tiny_cohort, tmp_path, monkeypatch):
    monkeypatch.setattr(work_plan, "LONG_SECONDS", 0)
    stages = open_run(tmp_path / "run", tiny_cohort, "demo", [*TINY, "engine.accelerator=cpu"], quiet=True)
    asked = []
    stages.ask = lambda question: bool(asked.append(question))
    with pytest.raises(InputError, match="stopped, as asked; the same command goes on"):
        stages.fit()
    assert asked == ["Go on?"]


def test_durations_are_said_as_people_say_them():
    assert [said_duration(seconds) for seconds in (30, 600, 3 * 3600, 40 * 3600, 13 * 86400)] == [
        "30 seconds",
        "10 minutes",
        "3.0 hours",
        "40 hours",
        "13 days",
    ]

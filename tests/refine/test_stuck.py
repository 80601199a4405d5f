"""A refinement that is really stuck: steps so large that all embeddings fall into one point, on real tiles."""

import json

import pytest
import torch
from tests.conftest import TINY

from its2clr.config import RefineConfig
from its2clr.engine.checkpoint import load_checkpoint
from its2clr.errors import TrainingError
from its2clr.files import read_metrics
from its2clr.refine import learner
from its2clr.refine.remedies import remedied, remedies
from its2clr.report import write_report
from its2clr.run.evaluation import evaluate
from its2clr.run.opening import open_run
from its2clr.training import TrainingStep

pytestmark = pytest.mark.xdist_group("stuck")  # what they share is made once
SETTINGS = [
    *TINY,
    "refine.epochs=6",
    "refine.refresh_every=3",
    "refine.schedule=constant",
    "refine.learning_rate=0.1",  # a tenth of it, the last remedy, does not collapse
]


@pytest.fixture(scope="module")
def start(tiny_cohort, tmp_path_factory):
    run = tmp_path_factory.mktemp("start") / "run"
    open_run(run, tiny_cohort, "demo", TINY, quiet=True).pretrain()
    return run


@pytest.fixture(scope="module")
def recovered(tiny_cohort, start, tmp_path_factory):
    """A run that got stuck, recovered, and was evaluated; with what it said."""
    stages = begin(tmp_path_factory.mktemp("stuck") / "run", tiny_cohort, start)
    said = []
    stages.engine.say = said.append
    stages.fit()
    evaluate(stages)
    return stages.run.path, said


def begin(run, cohort, start, *settings):
    return open_run(run, cohort, "demo", [*SETTINGS, f"pretrain.start={start}", *settings], quiet=True)


def trained(run):
    """What does not depend on how often a run was stopped: weights, rounds, metrics but for time, retries."""
    tensors, _ = load_checkpoint(run / "checkpoints" / "encoder-refined.safetensors")
    timed = {"seconds", "tiles_per_second"}
    entries = [
        {name: value for name, value in entry.items() if name not in timed}
        for entry in read_metrics(run)
        if entry["stage"] in {"refine", "round"}
    ]
    rounds = [path.read_text() for path in sorted(run.glob("rounds/*/metrics.json"))]
    return tensors, entries, rounds, json.loads((run / "retries.json").read_text())


def test_it_goes_back_tries_remedies_and_says_so(recovered):
    run, said = recovered
    retries = json.loads((run / "retries.json").read_text())
    assert [retry["remedy"] for retry in retries] == [
        "refine.learning_rate=0.03 instead of 0.1, with one epoch of warm-up",
        "refine.learning_rate=0.01 instead of 0.1, refine.momentum=0.45 instead of 0.9, with one epoch of warm-up",
    ]
    assert all(retry["back_to"] == 0 and retry["spread"] < 0.03 for retry in retries)
    told = [line for line in said if "refinement was stuck by epoch" in line]
    assert len(told) == 2
    assert "it went back to the start and tried refine.learning_rate=0.03" in told[0]
    entries = [entry for entry in read_metrics(run) if entry["stage"] == "refine"]
    assert [entry["epoch"] for entry in entries] == [1, 2, 3, 4, 5, 6]  # of the last attempt only
    assert all(entry["spread"] > 0.05 for entry in entries)
    assert not list((run / "checkpoints").glob("*-best-*"))


def test_results_and_report_tell_of_it(recovered):
    run, _ = recovered
    health = json.loads((run / "results.json").read_text())["health"]
    assert health["retries"] == json.loads((run / "retries.json").read_text())
    assert sum("refinement was stuck by epoch" in warning for warning in health["warnings"]) == 2
    assert not any("higher refine.learning_rate" in warning for warning in health["warnings"])
    assert "refinement was stuck by epoch" in write_report(run).read_text(encoding="utf-8")


@pytest.mark.parametrize("moment", ["in the retry", "while it goes back"])
def test_a_run_stopped_in_a_retry_continues_as_if_it_was_not(
    recovered, tiny_cohort, start, tmp_path, monkeypatch, moment
):
    stages = begin(tmp_path / "run", tiny_cohort, start)
    train_epoch = learner.train_epoch

    def stop_in_retry(step, batches, rates, keys):
        if rates[-1] == pytest.approx(0.03) and keys[2] == 3:
            raise KeyboardInterrupt
        return train_epoch(step, batches, rates, keys)

    def stop_when_told(message):
        if "went back" in message:
            raise KeyboardInterrupt

    if moment == "in the retry":
        monkeypatch.setattr(learner, "train_epoch", stop_in_retry)
    else:
        monkeypatch.setattr(stages.engine, "say", stop_when_told)
    with pytest.raises(KeyboardInterrupt):
        stages.refine()
    monkeypatch.undo()
    open_run(tmp_path / "run", quiet=True).refine()
    (tensors, *notes), (expected, *of_whole) = trained(tmp_path / "run"), trained(recovered[0])
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert notes == of_whole


def test_it_stops_when_no_remedy_helps(tiny_cohort, start, tmp_path):
    stages = begin(tmp_path / "run", tiny_cohort, start, "refine.learning_rate=3")
    with pytest.raises(TrainingError, match=r"refine: the representation collapsed.*Tried before: .*=0.9.*; .*=0.3"):
        stages.refine()
    assert len(json.loads((tmp_path / "run" / "retries.json").read_text())) == 2
    with pytest.raises(TrainingError, match=r"Tried before.*a lower refine.learning_rate"):  # and does not begin anew
        open_run(tmp_path / "run", quiet=True).refine()


def test_without_retries_it_stops_at_once(tiny_cohort, start, tmp_path):
    with pytest.raises(TrainingError, match="refine: the representation collapsed") as stopped:
        begin(tmp_path / "run", tiny_cohort, start, "refine.retries=0").refine()
    assert "Tried" not in str(stopped.value)
    assert not (tmp_path / "run" / "retries.json").exists()


def test_it_goes_back_to_the_last_round_that_passed_the_gate(recovered, tiny_cohort, start, tmp_path, monkeypatch):
    """Healthy until epoch 3, whose round passes; then the numbers of a point, until the learning rate is lower."""
    train_epoch, rates_of, weights = learner.train_epoch, {}, {}

    def stuck_after_three(step, batches, rates, keys):
        weights.setdefault(keys[2], []).append(step.network.state_dict()["encoder.backbone.conv1.weight"].clone())
        rates_of.setdefault(keys[2], []).append(rates)
        result = train_epoch(step, batches, rates, keys)
        stuck = keys[2] > 3 and rates[-1] > 0.0029
        return type(result)(4.844, 0.02 if stuck else 0.2, result.tiles_per_second, result.seconds)

    monkeypatch.setattr(learner, "train_epoch", stuck_after_three)
    settings = ["refine.learning_rate=0.003", "refine.epochs=9", "aggregator.epochs=1"]
    monkeypatch.setattr("its2clr.refine.rounds.Gate.passes", always_passes)
    begin(tmp_path / "run", tiny_cohort, start, *settings).refine()
    (retry,) = json.loads((tmp_path / "run" / "retries.json").read_text())
    assert (retry["seen"], retry["back_to"]) == (7, 3)
    assert {epoch: len(found) for epoch, found in rates_of.items()} == {
        **dict.fromkeys((1, 2, 3), 1),
        **dict.fromkeys((4, 5, 6, 7), 2),
        **dict.fromkeys((8, 9), 1),
    }
    assert torch.equal(*weights[4])  # the same state again: not the round of epoch 6, which passed while stuck
    warm, steady = rates_of[4][1], rates_of[5][1]
    assert warm == pytest.approx([0.0009 * (step + 1) / len(warm) for step in range(len(warm))])
    assert steady == pytest.approx([0.0009] * len(steady))


def always_passes(gate, reading):
    gate._progress.best_validation_auc, gate._progress.best_epoch = reading.validation_auc, reading.epoch
    return True


def test_remedies_in_order():
    paper = RefineConfig()
    assert [remedy.changes for remedy in remedies(paper)] == [
        {"learning_rate": pytest.approx(0.003)},
        {"learning_rate": pytest.approx(0.003), "temperature": 0.2},
        {"learning_rate": pytest.approx(0.001), "temperature": 0.2, "momentum": 0.9},
    ]
    assert remedied(paper, 0) is paper
    assert remedied(paper, 2).temperature == 0.2
    assert remedied(paper, 2).momentum == 0
    assert len(remedies(RefineConfig(temperature=0.3))) == 2  # no need to raise it
    assert len(remedies(RefineConfig(retries=1))) == 1
    assert remedies(RefineConfig(retries=0)) == []


def test_a_changed_step_has_the_new_loss_and_momentum(tiny_cohort, start, tmp_path):
    stages = begin(tmp_path / "run", tiny_cohort, start)
    network = torch.nn.Linear(2, 2)
    tiles = stages.context.train.tiles
    step = TrainingStep(network, tiles, lambda *_: torch.zeros(()), stages.config.refine, 4, 1, stages.engine)
    step.change(lambda *_: torch.ones(()), 0.45)
    assert [group["momentum"] for group in step.optimiser.param_groups] == [0.45]
    assert step._objective().item() == 1

"""All of Algorithm 1 against a slow loop written from the paper, on recorded batches: labels, gates, pools, weights."""

import copy
import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from tests.conftest import TINY

from its2clr.aggregators.training import train_aggregators
from its2clr.bag_features import BagFeatures
from its2clr.encoders.weights import load_network
from its2clr.errors import TrainingError
from its2clr.refine import learner
from its2clr.refine.labels import GroundTruth, InstanceLabels, PseudoLabels
from its2clr.refine.learner import Progress
from its2clr.refine.pseudo_labels import partition
from its2clr.refine.rounds import Gate, Reader, Reading
from its2clr.run.names import encoder_file
from its2clr.run.opening import open_run
from its2clr.training import EpochResult

EPOCHS, WARM_UP, EVERY, FIRST, LAST, SHARE, BATCH, ETA, TEMPERATURE = 6, 2, 2, 0.3, 0.9, 0.25, 32, 0.5, 0.3
SETTINGS = [
    *TINY,
    f"refine.epochs={EPOCHS}",
    f"refine.warmup_epochs={WARM_UP}",
    f"refine.refresh_every={EVERY}",
    f"refine.initial_ratio={FIRST}",
    f"refine.final_ratio={LAST}",
    f"refine.positive_fraction={SHARE}",
    f"refine.batch_size={BATCH}",
    f"refine.temperature={TEMPERATURE}",
    "refine.steps_per_epoch=3",
    "refine.learning_rate=0.02",
    "refine.aggregator_seeds=1",
    "refine.top_instance=false",
    *(f"refine.views.{name}_probability=0" for name in ("jitter", "grayscale", "blur")),
    *(f"refine.views.{name}_flip=0" for name in ("horizontal", "vertical")),
]
AUCS = [0.7, 0.6, 0.8, 0.75]
"""What validation is made to say after epochs 0, 2, 4 and 6: the second round and the last do not pass the gate."""


class Recorder:
    """A refinement that leaves what it did: the batches of every epoch, and what the reader really found."""

    def __init__(self, cohort, folder, monkeypatch, *settings, aucs=AUCS):
        self.batches, self.found = {}, []
        train_epoch, read, aucs = learner.train_epoch, Reader.read, iter(aucs)

        def record_epoch(step, batches, rates, keys):
            self.batches[keys[2]] = batches
            return train_epoch(step, batches, rates, keys)

        def record_round(reader, features, epoch):
            reading = read(reader, features, epoch)
            self.found.append(reading)
            return replace(reading, validation_auc=next(aucs))

        monkeypatch.setattr(learner, "train_epoch", record_epoch)
        monkeypatch.setattr(Reader, "read", record_round)
        self.stages = open_run(folder, cohort, "demo", [*SETTINGS, *settings], quiet=True)
        self.stages.refine()
        self.run, self.config = self.stages.run.path, self.stages.config
        folders = sorted((self.run / "rounds").iterdir())
        self.metrics = [json.loads((folder / "metrics.json").read_text()) for folder in folders]
        self.tables = [pd.read_parquet(folder / "pseudo_labels.parquet") for folder in folders]


@pytest.fixture(scope="module")
def recorded(tiny_cohort, tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        rule = ["refine.threshold_rule=negative_bags", "refine.false_positive_rate=0.4"]
        return Recorder(tiny_cohort, tmp_path_factory.mktemp("run") / "run", monkeypatch, *rule)


def slow_pools(probabilities, threshold, bags, labels, epoch):
    """Section 3.2 in plain words, for epochs 1 to T."""
    ratio = 1.0
    if epoch > WARM_UP:
        ratio = FIRST + (LAST - FIRST) * (epoch - WARM_UP) / (EPOCHS - WARM_UP)
    positive = [k for k, bag in enumerate(bags) if labels[bag] == 1 and probabilities[k] > threshold]
    negative = [k for k, bag in enumerate(bags) if labels[bag] == 1 and k not in positive]
    positive.sort(key=lambda k: -probabilities[k])
    negative.sort(key=lambda k: probabilities[k])
    clean = {k for k, bag in enumerate(bags) if labels[bag] == 0}
    kept = set(positive[: math.ceil(ratio * len(positive) - 1e-9)])
    if epoch <= WARM_UP:
        return clean, kept, set()
    return clean, kept, set(negative[: math.ceil(ratio * len(negative) - 1e-9)])


def slow_loss(embeddings, labels, anchors, temperature):
    """Equation 2, anchor by anchor."""
    unit = embeddings / embeddings.norm(dim=1, keepdim=True)
    losses = []
    for x in range(len(labels)):
        same = [k for k in range(len(labels)) if k != x and labels[k] == labels[x]]
        if not anchors[x] or not same:
            continue
        others = [k for k in range(len(labels)) if k != x]
        terms = torch.stack([unit[x] @ unit[k] / temperature for k in others])
        losses.append(torch.stack([terms.logsumexp(0) - unit[x] @ unit[s] / temperature for s in same]).mean())
    return torch.stack(losses).mean()


def slow_auc(labels, scores):
    scored = list(zip(scores, labels, strict=True))
    pairs = [(p, n) for p, positive in scored if positive for n, other in scored if not other]
    return sum(1.0 if p > n else 0.5 if p == n else 0.0 for p, n in pairs) / len(pairs)


def bag_features(encoder, bags):
    encoder.eval()
    with torch.no_grad():
        flat = torch.cat([encoder(tile[None]) for tile in bags.tiles.images])
    return BagFeatures(flat, torch.from_numpy(bags.offsets), torch.from_numpy(bags.labels))


def test_the_whole_of_algorithm_1_equals_a_slow_loop_written_from_the_paper(recorded):
    context = recorded.stages.context
    train, validation, config = context.train, context.validation, recorded.config.refine
    bags, labels = train.bag_of_instance.tolist(), train.labels.tolist()
    network = load_network(encoder_file(recorded.run, "start"))  # line 1
    optimiser = torch.optim.SGD(
        network.parameters(), lr=1.0, momentum=config.momentum, weight_decay=config.weight_decay
    )
    highest, in_use, step, best = -1.0, None, 0, None
    for epoch in range(EPOCHS + 1):  # line 2
        if epoch % EVERY == 0:
            number = epoch // EVERY
            features, on_validation = (bag_features(network.encoder, part) for part in (train, validation))  # 4, 6
            seeds = recorded.found[number].aggregators.seeds
            aggregator = train_aggregators(recorded.config.aggregator, features, on_validation, seeds)  # 8
            said = aggregator.predict(on_validation)
            auc = slow_auc(validation.labels, said.bag_probability[0])  # 9
            assert recorded.found[number].validation_auc == pytest.approx(auc, abs=1e-3)
            probabilities = aggregator.predict(features).instance_probability[0]
            np.testing.assert_allclose(recorded.found[number].probabilities[0], probabilities, atol=1e-3)
            known = said.instance_probability[0][validation.labels[validation.bag_of_instance] == 0]
            threshold = recorded.found[number].threshold
            passing = sum(value > threshold + 1e-3 for value in known), sum(value > threshold - 1e-3 for value in known)
            assert passing[0] <= 0.4 * len(known) <= passing[1] + 1
            improved = AUCS[number] >= highest  # 11
            highest = max(highest, AUCS[number])
            if improved:
                in_use = recorded.found[number].probabilities[0], threshold  # 13
                best = copy.deepcopy(network.state_dict())
            assert recorded.metrics[number]["improved"] == improved
            assert recorded.metrics[number]["pseudo_labels_replaced"] == improved
            selected = recorded.tables[number]["selected"].to_numpy()
            _, used, unused = slow_pools(*in_use, bags, labels, min(epoch + 1, EPOCHS))
            assert set(np.flatnonzero(selected == 1)) == used
            assert set(np.flatnonzero(selected == -1)) == unused
        if epoch == EPOCHS:
            break
        clean, positive, negative = slow_pools(*in_use, bags, labels, epoch + 1)
        batches = recorded.batches[epoch + 1]
        drawn = [row for batch in batches.indices.tolist() for row in batch]
        said = batches.labels.flatten().tolist()
        for pool, wanted in ((positive, 1), (clean | negative, 0)):
            rows = [row for row, label in zip(drawn, said, strict=True) if label == wanted]
            counts = [rows.count(row) for row in pool]
            assert set(rows) <= pool
            assert max(counts) - min(counts) <= 1
        network.train()
        for indices, of_batch, anchors in zip(*vars(batches).values(), strict=True):  # 16
            assert of_batch.sum() == round(SHARE * BATCH)
            assert torch.equal(anchors, of_batch == 0 if epoch + 1 <= WARM_UP else torch.ones(BATCH, dtype=torch.bool))
            images = train.tiles.images[indices].float() / 255
            _, embeddings = network(torch.cat([images, images]))
            loss = slow_loss(embeddings, [*of_batch.tolist()] * 2, [*anchors.tolist()] * 2, TEMPERATURE)
            optimiser.zero_grad()
            loss.backward()
            total = EPOCHS * len(batches.indices)
            optimiser.param_groups[0]["lr"] = config.learning_rate * (1 + math.cos(math.pi * step / total)) / 2
            optimiser.step()
            step += 1
    refined = load_network(encoder_file(recorded.run, "refined")).state_dict()
    for name, value in best.items():
        torch.testing.assert_close(refined[name], value, atol=1e-4, rtol=1e-3)
    moved = load_network(encoder_file(recorded.run, "start")).state_dict()["encoder.backbone.conv1.weight"]
    assert (moved - best["encoder.backbone.conv1.weight"]).abs().max() > 2e-3  # so the comparison above says something


def test_rounds_have_thresholds_of_their_own(recorded):
    thresholds = [found.threshold for found in recorded.found]
    assert len(set(thresholds)) == len(thresholds)


@pytest.mark.parametrize("objective", ["supervised_contrastive", "cross_entropy"])
def test_a_collapsed_contrastive_refinement_is_stopped(recorded, tiny_cohort, tmp_path, monkeypatch, objective):
    """What an epoch of embeddings in one point gives; with cross-entropy it means nothing."""
    point = EpochResult(loss=math.log(2 * BATCH - 1), spread=0.001, tiles_per_second=1.0, seconds=1.0)
    monkeypatch.setattr(learner, "train_epoch", lambda *arguments: point)
    settings = [*SETTINGS, f"pretrain.start={recorded.run}", f"refine.objective={objective}"]
    stages = open_run(tmp_path / "run", tiny_cohort, "demo", settings, quiet=True)
    if objective == "cross_entropy":
        stages.refine()
        return
    with pytest.raises(TrainingError, match=r"refine: the representation collapsed by epoch 4.*Tried before"):
        stages.refine()
    again = open_run(tmp_path / "run", quiet=True)  # the count goes on: three collapsed epochs were saved
    with pytest.raises(TrainingError, match=r"collapsed by epoch 4.*Tried before"):
        again.refine()


def test_labels_may_be_replaced_in_every_round(recorded, tiny_cohort, tmp_path, monkeypatch):
    settings = [f"pretrain.start={recorded.run}", "refine.relabel=always"]
    always = Recorder(tiny_cohort, tmp_path / "run", monkeypatch, *settings)
    passed = [True, False, True, False]
    assert [one["improved"] for one in always.metrics] == [one["improved"] for one in recorded.metrics] == passed
    assert [one["pseudo_labels_replaced"] for one in recorded.metrics] == passed
    assert all(one["pseudo_labels_replaced"] for one in always.metrics)


def test_the_first_epochs_may_keep_the_learning_rate(recorded, tiny_cohort, tmp_path, monkeypatch):
    rates = []

    def epoch(step, batches, of_steps, keys):
        rates.extend(of_steps)
        return EpochResult(loss=1.0, spread=1.0, tiles_per_second=1.0, seconds=1.0)

    monkeypatch.setattr(learner, "train_epoch", epoch)
    settings = [f"pretrain.start={recorded.run}", f"refine.refresh_every={EPOCHS}", "refine.constant_epochs=4"]
    open_run(tmp_path / "run", tiny_cohort, "demo", [*SETTINGS, *settings], quiet=True).refine()
    falling = [0.02 * (1 + math.cos(math.pi * step / (3 * EPOCHS))) / 2 for step in range(6)]
    assert rates == pytest.approx([0.02] * 12 + falling)


def test_the_gate_compares_what_it_is_told_to():
    nothing = np.zeros(0, np.float32)
    rounds = [
        Reading(auc, loss, nothing, nothing, 0.5, 0.0, epoch, None)
        for epoch, (auc, loss) in enumerate([(0.7, 0.6), (0.8, 0.7), (0.6, 0.5), (0.8, 0.5)])
    ]
    by_auc, by_loss, open_gate = Gate(Progress()), Gate(Progress(), "log_loss"), Gate(Progress(), "none")
    assert [by_auc.passes(one) for one in rounds] == [True, True, False, True]
    assert [by_loss.passes(one) for one in rounds] == [True, False, True, True]
    assert [open_gate.passes(one) for one in rounds[:3]] == [True, True, True]
    assert (by_auc.best_epoch, by_loss.best_epoch, open_gate.best_epoch) == (3, 3, 2)


def test_few_of_the_pseudo_negatives_may_be_used():
    scores = np.linspace(0, 1, 20)
    bag_labels = np.repeat([1, 0], 10)
    few = partition(scores, bag_labels, 0.4, 0.8, most_negatives=0.25)
    all_paced = partition(scores, bag_labels, 0.4, 0.8)
    assert few.pseudo_negative.tolist() == [0, 1]  # the lowest quarter of the eight
    assert len(all_paced.pseudo_negative) == 7
    assert few.pseudo_positive.tolist() == all_paced.pseudo_positive.tolist()
    assert partition(scores, bag_labels, 0.4, 0.8, most_negatives=0.0).pseudo_negative.size == 0


def test_where_labels_come_from():
    first, second = (InstanceLabels(np.full(3, value, np.float32), value) for value in (0.2, 0.4))
    assert PseudoLabels(iterative=True).labels(second, first) is second
    assert PseudoLabels(iterative=False).labels(second, first) is first
    assert PseudoLabels(iterative=False).labels(second, None) is second
    truth = GroundTruth(np.array([0, 1, 1], np.int8), 0.3)
    assert truth.labels(second, None).probabilities.tolist() == [0, 1, 1]
    assert truth.labels(second, None).threshold == 0.3
    kept = truth.labels(second, None)
    assert truth.labels(second, kept) is kept

"""Training: several seeds at once equal each alone, equal a plain loop; selection on validation bags only."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch.utils._python_dispatch import TorchDispatchMode

from its2clr.aggregators import aggregator_names, stacked, training
from its2clr.aggregators.base import cross_entropies
from its2clr.aggregators.folds import fold_of_bags
from its2clr.aggregators.log_mean_exp import PENALTIES
from its2clr.aggregators.stacked import build, padded_length
from its2clr.aggregators.trained import TrainedAggregators, bag_aucs
from its2clr.aggregators.training import draw_bags, train_aggregators
from its2clr.bag_features import BagFeatures
from its2clr.config import AggregatorTraining
from its2clr.errors import InputError, TrainingError
from its2clr.seeds import numpy_generator

from .conftest import separable_bags

TRAIN, VALIDATION = separable_bags(0), separable_bags(1, bags=20)
QUICK = {"epochs": 3, "learning_rate": 5e-3, "bags_per_step": 4}


def noise_bags(seed: int, bags: int = 12) -> BagFeatures:
    """Labels that nothing in the features gives away, so that the AUC goes up and down."""
    bags_of_noise = separable_bags(seed, bags)
    noise = torch.randn(bags_of_noise.features.shape, generator=torch.Generator().manual_seed(seed))
    return BagFeatures(noise, bags_of_noise.offsets, bags_of_noise.labels)


@pytest.mark.parametrize("name", aggregator_names())
def test_learns_a_separable_problem(name: str):
    epochs = 150 if name == "log_mean_exp" else 12  # one of its epochs is one step
    config = AggregatorTraining(name=name, epochs=epochs, learning_rate=1e-2, bags_per_step=8)
    trained = train_aggregators(config, TRAIN, VALIDATION, [0, 1])
    test = separable_bags(2)
    for probabilities in trained.predict(test).bag_probability:
        assert roc_auc_score(test.labels.numpy(), probabilities) > 0.95
    assert (trained.validation_auc > 0.95).all()


@pytest.mark.parametrize("name", aggregator_names())
@pytest.mark.parametrize("patience", [None, 1])
def test_a_seed_trained_among_others_equals_it_alone(name: str, patience: int | None):
    config = AggregatorTraining(name=name, patience=patience, balanced=True, **(QUICK | {"epochs": 5}))
    together = train_aggregators(config, TRAIN, VALIDATION, [3, 4, 5])
    for index, seed in enumerate(together.seeds):
        alone = train_aggregators(config, TRAIN, VALIDATION, [seed])
        assert alone.best_epoch[0] == together.best_epoch[index]
        assert alone.validation_auc[0] == pytest.approx(together.validation_auc[index])
        for key, tensor in alone.state.items():
            torch.testing.assert_close(tensor[0], together.state[key][index], atol=1e-5, rtol=1e-5)
    if name != "log_mean_exp":  # there is nothing random in its training
        first = next(iter(together.state.values()))
        assert not torch.allclose(first[0], first[1])


def test_log_mean_exp_equals_a_plain_loop():
    """Autograd, a module and torch's Adam on all bags at once, for one penalty and one fold."""
    config = AggregatorTraining(
        name="log_mean_exp", options={"penalty": 0.3, "sharpness": 2.0}, epochs=30, learning_rate=0.05, folds=True
    )
    trained = train_aggregators(config, TRAIN, VALIDATION, [0, 1, 2])
    kept = np.flatnonzero(fold_of_bags(TRAIN, [0, 1, 2]) != 1)
    part = TRAIN.subset(kept)
    aggregator = build("log_mean_exp", config.options, TRAIN.feature_dim)
    with torch.no_grad():
        aggregator.centre.copy_(TRAIN.features.mean(0))
        aggregator.scale.copy_(TRAIN.features.std(0, correction=0))
        aggregator.instance_classifier.weight.zero_()
        aggregator.instance_classifier.bias.zero_()
    optimiser = torch.optim.Adam(aggregator.parameters(), lr=0.05, betas=(0.9, 0.99), eps=1e-6)
    weight = torch.where(part.labels == 1, 0.5 / part.labels.sum(), 0.5 / (1 - part.labels).sum())
    for epoch in range(30):
        optimiser.param_groups[0]["lr"] = 0.05 * 0.5 * (1 + math.cos(math.pi * epoch / 30))
        optimiser.zero_grad()
        logits = aggregator(*part.batch(torch.arange(len(part)))).bag_logit
        losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, part.labels, reduction="none")
        ((weight * losses).sum() + 0.3 * aggregator.instance_classifier.weight.square().sum()).backward()
        optimiser.step()
    for key, tensor in aggregator.state_dict().items():
        torch.testing.assert_close(trained.state[key][1], tensor, atol=2e-4, rtol=1e-3)


def test_log_mean_exp_takes_the_penalty_with_the_lowest_validation_loss():
    config = AggregatorTraining(name="log_mean_exp", epochs=40, learning_rate=0.05)
    train, validation = noise_bags(1, 20), noise_bags(2, 20)
    losses = []
    for penalty in PENALTIES:
        alone = config.model_copy(update={"options": {"penalty": penalty}})
        losses.append(train_aggregators(alone, train, validation, [0]).history[-1]["validation_loss"][0])
    chosen = train_aggregators(config, train, validation, [0]).history[-1]["validation_loss"][0]
    assert chosen == pytest.approx(min(losses), abs=1e-5)
    assert max(losses) - min(losses) > 1e-3


@pytest.mark.parametrize("name", ["log_mean_exp", "max"])
def test_with_folds_a_seed_does_not_see_its_own_fold(name: str):
    config = AggregatorTraining(name=name, folds=True, **(QUICK | {"epochs": 5}))
    seeds = [3, 4, 5]
    groups = np.array([f"patient {bag // 2}" for bag in range(len(TRAIN))])
    train = BagFeatures(TRAIN.features, TRAIN.offsets, TRAIN.labels, groups)
    fold = fold_of_bags(train, seeds)
    assert set(fold) == {0, 1, 2}
    assert all(len(set(fold[groups == group])) == 1 for group in groups)
    changed = train.features.clone()
    for bag in np.flatnonzero(fold == 1):
        changed[train.offsets[bag] : train.offsets[bag + 1]] *= -1
    before = train_aggregators(config, train, VALIDATION, seeds)
    after = train_aggregators(config, BagFeatures(changed, train.offsets, train.labels, groups), VALIDATION, seeds)
    key = "instance_classifier.weight"
    if name == "max":  # the other standardises by all training instances
        torch.testing.assert_close(before.state[key][1], after.state[key][1])
    assert not torch.allclose(before.state[key][0], after.state[key][0])


@pytest.mark.parametrize("name", ["dsmil", "top_k"])
def test_equals_a_plain_loop_over_single_bags(name: str):
    """One bag per step without padding, torch's Adam and StepLR: the paper's setting, written out."""
    config = AggregatorTraining(name=name, epochs=3, step_size=2, learning_rate=1e-3)
    trained = train_aggregators(config, TRAIN, VALIDATION, [7, 8])
    aggregator = build(name, {}, TRAIN.feature_dim, seed=8)
    optimizer = torch.optim.Adam(aggregator.parameters(), lr=1e-3, betas=(0.5, 0.9), weight_decay=5e-3)
    generator = numpy_generator(8, "bag order")
    for epoch in range(1, 4):
        optimizer.param_groups[0]["lr"] = 1e-3 if epoch <= 2 else 5e-4
        for bag in generator.permutation(len(TRAIN)):
            optimizer.zero_grad()
            instances = TRAIN.features[TRAIN.offsets[bag] : TRAIN.offsets[bag + 1]]
            aggregator.loss(aggregator(instances[None]), TRAIN.labels[bag : bag + 1]).backward()
            optimizer.step()
        if epoch == trained.best_epoch[1]:
            for key, tensor in aggregator.state_dict().items():
                torch.testing.assert_close(trained.state[key][1], tensor, atol=1e-5, rtol=1e-5)
    assert [record["learning_rate"] for record in trained.history] == [1e-3, 1e-3, 5e-4]


@pytest.mark.parametrize(("setting", "weight"), [("balanced", 20 / 4), (0.5, 0.5)])
@pytest.mark.parametrize("bags_per_step", [1, 5])
def test_weighted_bags_equal_a_plain_loop(setting: str | float, weight: float, bags_per_step: int):
    """20 negative and 4 positive bags, each loss alone; in both seeds, stacked. Validation bags are weighted alike."""
    train = TRAIN.subset([*range(0, 40, 2), 1, 3, 5, 7])
    options = {"prediction": "embedding"}
    config = AggregatorTraining(
        options=options, positive_weight=setting, epochs=1, learning_rate=1e-3, bags_per_step=bags_per_step
    )
    trained = train_aggregators(config, train, VALIDATION, [7, 8])

    def loss_of(bags: BagFeatures, bag: int) -> torch.Tensor:
        instances, label = bags.features[bags.offsets[bag] : bags.offsets[bag + 1]], bags.labels[bag : bag + 1]
        return aggregator.loss(aggregator(instances[None]), label) * (weight if label else 1.0)

    for index, seed in enumerate(trained.seeds):
        aggregator = build("dsmil", options, train.feature_dim, seed=seed)
        optimizer = torch.optim.Adam(aggregator.parameters(), lr=1e-3, betas=(0.5, 0.9), weight_decay=5e-3)
        order = numpy_generator(seed, "bag order").permutation(len(train))
        for start in range(0, len(order), bags_per_step):
            optimizer.zero_grad()
            torch.stack([loss_of(train, bag) for bag in order[start : start + bags_per_step]]).mean().backward()
            optimizer.step()
        for key, tensor in aggregator.state_dict().items():
            torch.testing.assert_close(trained.state[key][index], tensor, atol=1e-5, rtol=1e-5)
        validation = np.mean([loss_of(VALIDATION, bag).item() for bag in range(len(VALIDATION))])
        assert trained.history[0]["validation_loss"][index] == pytest.approx(validation, abs=1e-4)


def test_best_epoch_is_by_auc_then_loss_on_validation_bags():
    validation = noise_bags(3)
    config = AggregatorTraining(name="attention", **(QUICK | {"epochs": 10}))
    trained = train_aggregators(config, TRAIN, validation, [0, 1, 2])
    assert len(trained.history) == 10
    for index in range(3):
        ranked = sorted(
            trained.history, key=lambda record: (-record["validation_auc"][index], record["validation_loss"][index])
        )
        assert trained.best_epoch[index] == ranked[0]["epoch"]
        assert trained.validation_auc[index] == ranked[0]["validation_auc"][index]
    assert len(set(trained.best_epoch.tolist())) > 1  # else the last epoch would pass for the best
    # what was kept are the parameters of that epoch: the recorded AUC comes out again
    for index, probabilities in enumerate(trained.predict(validation).bag_probability):
        assert roc_auc_score(validation.labels.numpy(), probabilities) == pytest.approx(trained.validation_auc[index])


def test_aucs_of_all_seeds_at_once_are_the_library_s():
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 50)
    scores = generator.normal(size=(4, 50)).astype(np.float32)
    scores[1] = scores[1].round()  # ties
    scores[2] = 0
    expected = [roc_auc_score(labels, row) for row in scores]
    assert bag_aucs(labels, scores) == pytest.approx(expected, abs=1e-12)


def test_bags_are_padded_to_few_lengths_and_never_by_more_than_a_third():
    lengths = range(1, 5000)
    padded = [padded_length(length) for length in lengths]
    assert all(found >= length for found, length in zip(padded, lengths, strict=True))
    assert all(found <= 1.5 * length + 1 for found, length in zip(padded, lengths, strict=True) if length >= 16)
    assert sorted(set(padded))[:5] == [16, 24, 32, 48, 64]
    assert len(set(padded)) < 20


def test_equal_auc_is_decided_by_the_loss():
    selection = training._Selection({"w": torch.zeros(2, 1)}, patience=None)
    rows = [((0.8, 0.8), (0.5, 0.5)), ((0.8, 0.8), (0.4, 0.6)), ((0.7, 0.9), (0.1, 0.9)), ((0.8, 0.9), (0.4, 0.9))]
    for epoch, (auc, loss) in enumerate(rows, start=1):
        record = {"epoch": epoch, "validation_auc": list(auc), "validation_loss": list(loss)}
        selection.update(record, {"w": torch.full((2, 1), float(epoch))})
    assert selection.epoch.tolist() == [2, 3]
    assert selection.state["w"].flatten().tolist() == [2.0, 3.0]


def test_patience_stops_training():
    config = AggregatorTraining(name="max", patience=2, **(QUICK | {"epochs": 60}))
    trained = train_aggregators(config, TRAIN, noise_bags(4), [0, 1])
    assert len(trained.history) == trained.best_epoch.max() + 2 < 60


def test_validation_bags_do_not_change_what_is_learned():
    config = AggregatorTraining(name="dsmil", **QUICK)
    losses = [
        [record["train_loss"] for record in train_aggregators(config, TRAIN, bags, [0]).history]
        for bags in (VALIDATION, noise_bags(5, bags=30))
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["dsmil", "transformer"])
def test_deterministic_and_global_random_state_untouched(name: str):
    config = AggregatorTraining(name=name, options={"dropout": 0.3}, **QUICK)
    runs = []
    for global_seed in (0, 1):
        torch.manual_seed(global_seed)
        np.random.seed(global_seed)  # noqa: NPY002 (the global state is what is tested)
        before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
        trained = train_aggregators(config, TRAIN, VALIDATION, [0, 1])
        trained.predict(VALIDATION)
        trained.modules()
        assert torch.equal(torch.get_rng_state(), before[0])
        assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
        runs.append(trained)
    assert runs[0].history == runs[1].history
    for key, tensor in runs[0].state.items():
        assert torch.equal(tensor, runs[1].state[key])
    without = train_aggregators(AggregatorTraining(name=name, **QUICK), TRAIN, VALIDATION, [0, 1])
    assert without.history[0]["train_loss"] != runs[0].history[0]["train_loss"]  # dropout was active


@pytest.mark.parametrize(("positives", "negatives"), [(3, 10), (10, 3), (4, 4)])
def test_balanced_draws_are_balanced(positives: int, negatives: int):
    labels = np.array([1] * positives + [0] * negatives)
    generator = np.random.default_rng(0)
    orders = [draw_bags(labels, generator, balanced=True) for _ in range(5)]
    for order in orders:
        counts = np.bincount(order, minlength=len(labels))
        draws = max(positives, negatives)
        assert counts[labels == 1].sum() == counts[labels == 0].sum() == draws
        for label in (0, 1):
            of_class = counts[labels == label]
            assert of_class.min() == draws // len(of_class)
            assert of_class.max() == -(-draws // len(of_class))
    assert not np.array_equal(orders[0], orders[1])


def test_unbalanced_draws_take_every_bag_once():
    order = draw_bags(np.array([1, 0, 0, 0, 0, 0, 0]), np.random.default_rng(0), balanced=False)
    assert sorted(order) == list(range(7))
    assert order.tolist() != list(range(7))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_balanced_changes_what_training_sees(monkeypatch):
    seen = []

    def record(step, bags, order, *, bags_per_step):
        seen.append(bags.labels.numpy()[order])
        return torch.zeros(len(order))

    monkeypatch.setattr(training, "_train_epoch", record)
    rare = TRAIN.subset([*range(0, 40, 2), 1, 3])
    for balanced in (False, True):
        config = AggregatorTraining(name="max", epochs=1, balanced=balanced)
        train_aggregators(config, rare, VALIDATION, [0])
    assert seen[0].mean() == pytest.approx(2 / 22)
    assert seen[1].mean() == 0.5


@pytest.mark.parametrize(("scheduler", "expected"), [("cosine", [1.0, 0.75, 0.25]), ("constant", [1.0, 1.0, 1.0])])
def test_schedules(scheduler: str, expected: list[float]):
    config = AggregatorTraining(name="max", scheduler=scheduler, **QUICK)
    records = []
    train_aggregators(config, TRAIN, VALIDATION, [0], progress=records.append)
    assert [record["learning_rate"] / 5e-3 for record in records] == pytest.approx(expected)


@pytest.mark.parametrize("name", aggregator_names())
def test_predict_equals_the_modules_bag_by_bag(name: str, monkeypatch):
    trained = train_aggregators(AggregatorTraining(name=name, **QUICK), TRAIN, VALIDATION, [0, 1, 2])
    monkeypatch.setattr(stacked, "BATCH_VALUES", 20 * TRAIN.feature_dim)  # several batches
    monkeypatch.setattr(stacked, "PASS_VALUES", 30 * TRAIN.feature_dim)  # and some seed by seed
    predictions = trained.predict(VALIDATION, bags_per_batch=3)
    assert predictions.bag_probability.dtype == np.float64
    for seed, module in enumerate(trained.modules()):
        for bag in range(len(VALIDATION)):
            start, end = VALIDATION.offsets[bag : bag + 2].tolist()
            with torch.no_grad():
                output = module(VALIDATION.features[start:end][None])
            assert predictions.bag_probability[seed, bag] == pytest.approx(output.bag_logit.sigmoid().item(), abs=1e-5)
            logits = output.instance_logits[0]
            np.testing.assert_allclose(predictions.instance_logit[seed, start:end], logits.numpy(), atol=1e-5)
            np.testing.assert_allclose(
                predictions.instance_probability[seed, start:end], logits.sigmoid().numpy(), atol=1e-5
            )
            if output.attention is None:
                assert predictions.attention is None
            else:
                np.testing.assert_allclose(predictions.attention[seed, start:end], output.attention[0], atol=1e-5)


def test_saved_aggregators_come_back_equal(tmp_path):
    config = AggregatorTraining(name="attention", options={"gated": True, "hidden_dim": 6}, **QUICK)
    trained = train_aggregators(config, TRAIN, VALIDATION, [0, 9])
    path = tmp_path / "aggregator.safetensors"
    trained.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["aggregator.safetensors"]
    loaded = TrainedAggregators.load(path)
    for field in ("name", "options", "feature_dim", "seeds", "history"):
        assert getattr(loaded, field) == getattr(trained, field)
    np.testing.assert_array_equal(loaded.validation_auc, trained.validation_auc)
    np.testing.assert_array_equal(loaded.best_epoch, trained.best_epoch)
    for ours, theirs in zip(trained.predict(VALIDATION), loaded.predict(VALIDATION), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_dsmil_saved_before_it_had_predictions_predicts_with_the_mean(tmp_path):
    """Files of before name no prediction; the parameters are the same for both, so only the name can tell."""
    trained = train_aggregators(AggregatorTraining(name="dsmil", **QUICK), TRAIN, VALIDATION, [0])
    trained.save(tmp_path / "old")
    old = TrainedAggregators.load(tmp_path / "old")
    assert old.options == {}
    of_mean, of_embedding = (
        replace(old, options={"prediction": name}).predict(VALIDATION).bag_probability for name in ("mean", "embedding")
    )
    np.testing.assert_array_equal(old.predict(VALIDATION).bag_probability, of_mean)
    assert not np.allclose(of_mean, of_embedding)


def test_load_refuses_other_files(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        TrainedAggregators.load(tmp_path / "missing")
    (tmp_path / "text").write_text("not tensors")
    with pytest.raises(InputError, match="not a safetensors file"):
        TrainedAggregators.load(tmp_path / "text")


def test_refuses_what_cannot_be_trained():
    config = AggregatorTraining(name="max", epochs=1)
    with pytest.raises(InputError, match=r"validation bags must hold both classes, but 0 of 3 are positive"):
        train_aggregators(config, TRAIN, VALIDATION.subset([0, 2, 4]), [0])
    with pytest.raises(InputError, match="validation bags have no labels"):
        train_aggregators(config, TRAIN, BagFeatures(VALIDATION.features, VALIDATION.offsets), [0])
    with pytest.raises(InputError, match="no seed twice"):
        train_aggregators(config, TRAIN, VALIDATION, [1, 1])
    huge = BagFeatures(TRAIN.features * 1e37, TRAIN.offsets, TRAIN.labels)
    with pytest.raises(TrainingError, match="not finite in epoch 1"):
        train_aggregators(AggregatorTraining(name="attention", epochs=1, learning_rate=1e3), huge, VALIDATION, [0])


def test_config_refuses_unknown_keys_and_describes_every_field():
    with pytest.raises(ValueError, match="epoch_count"):
        AggregatorTraining(epoch_count=3)
    assert all(field.description for field in AggregatorTraining.model_fields.values())


class Operations(TorchDispatchMode):
    """Counts operations that compute something: on a GPU each is at least one kernel."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view and not any(word in function.name() for word in ("empty", "view", "record"))
        return function(*args, **(kwargs or {}))


def test_a_step_of_dsmil_is_few_operations_also_with_several_seeds():
    """A recorded step takes as long as it has kernels, so an operation more in model, loss or batch is time lost."""
    counts = []
    for seeds in (1, 5):
        template, *others = (stacked.build("dsmil", {}, 8, seed) for seed in range(seeds))
        state, names = stacked.stack([template, *others], torch.device("cpu"))
        optimiser = torch.optim.Adam([state[name].requires_grad_() for name in names], fused=True)
        bags = BagFeatures(torch.randn(6, 8), torch.tensor([0, 2, 6]), torch.tensor([0, 1]))
        step = stacked.TrainingStep(template, state, optimiser, bags)
        step(torch.zeros(seeds, 1, dtype=torch.int64), 4)
        with Operations() as operations:
            step(torch.ones(seeds, 1, dtype=torch.int64), 4)
        counts.append(operations.count)
    assert counts[0] <= 66
    assert counts[1] <= 1.3 * counts[0]


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_the_cross_entropy_of_one_operation_is_the_library_s(label: float):
    logits = torch.tensor([-200.0, -30.0, -1.0, 0.0, 1e-3, 5.0, 19.9, 20.1, 300.0]).double().requires_grad_()
    labels = torch.full_like(logits, label)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    found = cross_entropies(logits, labels)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    gradients = [torch.autograd.grad(losses.sum(), logits)[0] for losses in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)

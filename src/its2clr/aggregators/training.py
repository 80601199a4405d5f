"""Training of aggregators: several seeds at once, each with the same result as alone, selected on validation bags."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, StepLR

from its2clr.aggregators.folds import training_bags
from its2clr.aggregators.log_mean_exp import LogMeanExp, train_log_mean_exp
from its2clr.aggregators.stacked import TrainingStep, ValidationPass, build, stack
from its2clr.aggregators.trained import EpochRecord, TrainedAggregators, bag_aucs
from its2clr.bag_features import BagFeatures
from its2clr.config import AggregatorTraining
from its2clr.errors import InputError, TrainingError
from its2clr.seeds import derive_seed, numpy_generator


def train_aggregators(
    config: AggregatorTraining,
    train: BagFeatures,
    validation: BagFeatures,
    seeds: Sequence[int],
    progress: Callable[[EpochRecord], None] | None = None,
) -> TrainedAggregators:
    """Train one aggregator per seed, all at once, and keep each at its best epoch.

    The seeds are independent: each has its own initial parameters, bag order, best epoch and patience, so it gives the
    same result as when trained alone (except with dropout, whose draws depend on which seeds are trained together). The
    best epoch is the one with the highest bag-level AUC on the validation bags; of equal ones, the one with the lowest
    validation loss. The global random state is neither used nor changed.

    Args:
        config: the aggregator and its training.
        train: labelled bags to learn from.
        validation: labelled bags to select on, on the same device.
        seeds: one aggregator is trained for each.
        progress: called after every epoch.

    Raises:
        InputError: the bags do not fit together or do not hold both classes.
        TrainingError: a loss is no longer finite.
    """
    _check(train, validation, seeds)
    modules = [build(config.name, config.options, train.feature_dim, seed) for seed in seeds]
    if isinstance(modules[0], LogMeanExp):
        return train_log_mean_exp(config, modules[0], train, validation, seeds, progress)
    template = modules[0]
    labels, validation_labels = _labels(train), _labels(validation)
    template.positive_weight = positive_weight(config, labels)
    state, parameter_names = stack(modules, train.device)
    parameters = [state[name].requires_grad_() for name in parameter_names]
    on_gpu = train.device.type == "cuda"
    # Adam works element by element, so one Adam over the stacked parameters equals one per seed.
    optimizer = torch.optim.Adam(
        parameters,
        lr=torch.tensor(config.learning_rate, device=train.device) if on_gpu else config.learning_rate,
        capturable=on_gpu,
        betas=config.betas,
        weight_decay=config.weight_decay,
        fused=train.device.type in {"cpu", "cuda"},
    )
    scheduler = _scheduler(config, optimizer)
    step = TrainingStep(template, state, optimizer, train)
    validate = ValidationPass(template, state, validation)
    generators = [numpy_generator(seed, "bag order") for seed in seeds]
    own_bags = [np.flatnonzero(row) for row in training_bags(train, seeds, folds=config.folds).numpy()]
    selection = _Selection(state, patience=config.patience)
    history: list[EpochRecord] = []

    with _own_random_state(train.device, seeds):
        for epoch in range(1, config.epochs + 1):
            order = _same_length(
                [
                    bags[draw_bags(labels[bags], generator, config.balanced)]
                    for bags, generator in zip(own_bags, generators, strict=True)
                ]
            )
            learning_rate = float(scheduler.get_last_lr()[0])
            train_loss = _train_epoch(step, train, order, bags_per_step=config.bags_per_step)
            scheduler.step()

            logits, validation_loss = validate()
            numbers = torch.cat([train_loss[:, None], validation_loss[:, None], logits], dim=1).cpu().numpy()
            record = EpochRecord(
                epoch=epoch,
                learning_rate=learning_rate,
                train_loss=numbers[:, 0].tolist(),
                validation_loss=numbers[:, 1].tolist(),
                validation_auc=[],
            )
            _check_finite(record, config)
            record["validation_auc"] = bag_aucs(validation_labels, numbers[:, 2:]).tolist()
            history.append(record)
            selection.update(record, state)
            if progress is not None:
                progress(record)
            if selection.finished:
                break

    return TrainedAggregators(
        name=config.name,
        options=dict(config.options),
        feature_dim=train.feature_dim,
        seeds=tuple(seeds),
        validation_auc=selection.auc,
        best_epoch=selection.epoch,
        history=history,
        state=selection.state,
    )


def aggregator_seeds(seed: int, count: int) -> list[int]:
    """Seeds of a run's aggregators; the same in every round, so that rounds differ only by their features."""
    return [derive_seed(seed, "aggregator", number) % 2**31 for number in range(count)]


def positive_weight(config: AggregatorTraining, labels: NDArray[np.int64]) -> float:
    """How often a positive bag counts in the loss: the setting, or negative over positive of the training bags."""
    if isinstance(config.positive_weight, str):
        return float((labels == 0).sum() / (labels == 1).sum())
    return config.positive_weight


def draw_bags(labels: NDArray[np.int64], generator: np.random.Generator, balanced: bool) -> NDArray[np.int64]:
    """Bags of one epoch, in random order.

    Args:
        labels: (n_bags,) 0 or 1.
        generator: source of randomness.
        balanced: if true, each bag of the more frequent class is drawn once, and bags of the rarer class are repeated
            until there are as many. The numbers of draws of two bags of a class differ by at most one. If false, every
            bag is drawn once.
    """
    if not balanced:
        return generator.permutation(len(labels))
    classes = [np.flatnonzero(labels == label) for label in (0, 1)]
    draws = max(len(bags) for bags in classes)
    repeated = [
        np.concatenate([generator.permutation(bags) for _ in range(-(-draws // len(bags)))])[:draws] for bags in classes
    ]
    return generator.permutation(np.concatenate(repeated))


def _same_length(orders: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Orders of the seeds as (S, draws); shorter ones, of smaller folds, begin again from their start."""
    return np.stack([np.resize(order, max(map(len, orders))) for order in orders])


def _train_epoch(step: TrainingStep, bags: BagFeatures, order: NDArray[np.int64], *, bags_per_step: int) -> Tensor:
    """One pass over the bags in each seed's order (S, draws); returns the mean losses (S,)."""
    draws = order.shape[1]
    lengths = bags.sizes[order].max(axis=0)
    indices = torch.from_numpy(order).to(bags.device)
    total = torch.zeros(len(order), device=bags.device)
    for start in range(0, draws, bags_per_step):
        places = slice(start, min(start + bags_per_step, draws))
        losses = step(indices[:, places], int(lengths[places].max()))
        total.add_(losses, alpha=(places.stop - places.start) / draws)
    return total


class _Selection:
    """The best epoch of each seed so far, with its parameters."""

    def __init__(self, state: dict[str, Tensor], patience: int | None) -> None:
        self.state = {name: tensor.detach().clone() for name, tensor in state.items()}
        seeds = len(next(iter(state.values())))
        self.patience = patience
        self.auc = np.full(seeds, -np.inf)
        self.loss = np.full(seeds, np.inf)
        self.epoch = np.zeros(seeds, dtype=np.int64)
        self.active = np.ones(seeds, dtype=np.bool_)

    @property
    def finished(self) -> bool:
        """Whether every seed has run out of patience."""
        return not self.active.any()

    def update(self, record: EpochRecord, state: dict[str, Tensor]) -> None:
        """Keep the seeds that are better now; a seed that has run out of patience stays as it is."""
        auc, loss = np.array(record["validation_auc"]), np.array(record["validation_loss"])
        better = self.active & ((auc > self.auc) | ((auc == self.auc) & (loss < self.loss)))
        self.auc[better], self.loss[better], self.epoch[better] = auc[better], loss[better], record["epoch"]
        if self.patience is not None:
            self.active &= record["epoch"] - self.epoch < self.patience
        if better.any():
            chosen = torch.from_numpy(np.flatnonzero(better)).to(next(iter(state.values())).device)
            for name, tensor in state.items():
                self.state[name][chosen] = tensor.detach()[chosen]


@contextmanager
def _own_random_state(device: torch.device, seeds: Sequence[int]) -> Iterator[None]:
    """Seed the global generators for dropout; afterwards restore the caller's state."""
    seed = derive_seed(*seeds, "aggregator dropout")
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def _scheduler(config: AggregatorTraining, optimizer: torch.optim.Optimizer) -> LRScheduler:
    if config.scheduler == "step":
        return StepLR(optimizer, config.step_size, config.gamma)
    if config.scheduler == "cosine":
        return CosineAnnealingLR(optimizer, config.epochs)
    return LambdaLR(optimizer, lambda _: 1.0)


def _labels(bags: BagFeatures) -> NDArray[np.int64]:
    assert bags.labels is not None
    return bags.labels.cpu().numpy().astype(np.int64)


def _check(train: BagFeatures, validation: BagFeatures, seeds: Sequence[int]) -> None:
    if not seeds or len(set(seeds)) != len(seeds):
        raise InputError(f"give at least one seed, and no seed twice; got {list(seeds)}")
    for part, bags in (("training", train), ("validation", validation)):
        if bags.labels is None:
            raise InputError(f"the {part} bags have no labels")
        positives = int(bags.labels.sum())
        if positives in {0, len(bags)}:
            raise InputError(
                f"the {part} bags must hold both classes, but {positives} of {len(bags)} are positive; "
                "assign bags of the missing class to this split"
            )
    if train.feature_dim != validation.feature_dim or train.device != validation.device:
        raise InputError(
            f"training bags have {train.feature_dim} features on {train.device}, but validation bags have "
            f"{validation.feature_dim} on {validation.device}; they must be the same"
        )


def _check_finite(record: EpochRecord, config: AggregatorTraining) -> None:
    if not np.isfinite([*record["train_loss"], *record["validation_loss"]]).all():
        raise TrainingError(
            f"the loss of aggregator {config.name!r} is not finite in epoch {record['epoch']}; "
            f"lower its learning_rate ({config.learning_rate:g}) or scale the features"
        )

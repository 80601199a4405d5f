"""Trained aggregators of several seeds: their predictions, their modules, and their file on disk."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from scipy.special import expit
from scipy.stats import rankdata
from torch import Tensor

from its2clr.aggregators.base import Aggregator
from its2clr.aggregators.stacked import build, evaluate
from its2clr.bag_features import BagFeatures
from its2clr.engine.bounded import bounded_by
from its2clr.errors import InputError
from its2clr.files import atomic_path, damage_said

FILE_FORMAT = "its2clr.aggregators/1"


class EpochRecord(TypedDict):
    """One epoch of training; the lists have one value per seed. Epochs count from 1."""

    epoch: int
    learning_rate: float
    train_loss: list[float]
    validation_loss: list[float]
    validation_auc: list[float]


class Predictions(NamedTuple):
    """What S aggregators predict for n_bags bags with N instances, bag after bag.

    Attributes:
        bag_probability: (S, n_bags) float64.
        instance_probability: (S, N) float32.
        instance_logit: (S, N) float32; ranks even instances whose probability is rounded to 0 or 1.
        attention: (S, N) float32, sums to one over a bag; None if the aggregator has none.
    """

    bag_probability: NDArray[np.float64]
    instance_probability: NDArray[np.float32]
    instance_logit: NDArray[np.float32]
    attention: NDArray[np.float32] | None


@dataclass(frozen=True)
class TrainedAggregators:
    """Aggregators of one kind, one per seed, each at its best epoch on the validation bags.

    Attributes:
        name: the aggregator's name.
        options: its options.
        feature_dim: number of features of an instance.
        seeds: the S seeds.
        validation_auc: (S,) bag-level AUC at the best epoch.
        best_epoch: (S,) that epoch, counted from 1.
        history: one record per epoch.
        state: parameters and buffers, stacked (S, ...).
    """

    name: str
    options: Mapping[str, Any]
    feature_dim: int
    seeds: tuple[int, ...]
    validation_auc: NDArray[np.float64]
    best_epoch: NDArray[np.int64]
    history: list[EpochRecord]
    state: Mapping[str, Tensor]

    def to(self, device: torch.device | str) -> "TrainedAggregators":
        """The same aggregators on another device."""
        return replace(self, state={name: tensor.to(device) for name, tensor in self.state.items()})

    def template(self) -> Aggregator:
        """An aggregator of this kind with weights of its own; one much larger than the trained weights is not built.

        Raises:
            InputError: The options ask for such a one, or are wrong.
        """
        with bounded_by(self.state, f"the trained aggregators ({self.name})"):
            return build(self.name, self.options, self.feature_dim)

    def modules(self) -> list[Aggregator]:
        """The aggregators one by one, in the order of the seeds, in evaluation mode."""
        modules = []
        for index in range(len(self.seeds)):
            module = self.template()
            module.load_state_dict({name: tensor[index].clone() for name, tensor in self.state.items()}, assign=True)
            modules.append(module.eval().requires_grad_())
        return modules

    def predict(self, bags: BagFeatures, bags_per_batch: int = 64) -> Predictions:
        """Predict bags and their instances, on the device of the bags.

        Args:
            bags: the bags; their labels are ignored.
            bags_per_batch: largest number of bags in one forward pass; with large bags, fewer are used.
        """
        if bags.feature_dim != self.feature_dim:
            raise InputError(
                f"the aggregators were trained on {self.feature_dim} features, but these bags have {bags.feature_dim}"
            )
        unlabelled = BagFeatures(bags.features, bags.offsets) if bags.labels is not None else bags
        output = evaluate(self.template(), self.to(bags.device).state, unlabelled, bags_per_batch)
        instance_logit = output.instance_logits.cpu().numpy()
        return Predictions(
            bag_probability=expit(output.bag_logit.double().cpu().numpy()),
            instance_probability=expit(instance_logit),
            instance_logit=instance_logit,
            attention=None if output.attention is None else output.attention.cpu().numpy(),
        )

    def save(self, path: str | Path) -> None:
        """Write everything into one safetensors file."""
        description = {
            "name": self.name,
            "options": dict(self.options),
            "feature_dim": self.feature_dim,
            "seeds": list(self.seeds),
            "validation_auc": self.validation_auc.tolist(),
            "best_epoch": self.best_epoch.tolist(),
            "history": self.history,
        }
        tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in self.state.items()}
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, {"format": FILE_FORMAT, "aggregators": json.dumps(description)})

    @classmethod
    def load(cls, path: str | Path) -> "TrainedAggregators":
        """Read what `save` wrote, onto the CPU.

        Raises:
            InputError: the file is missing or holds something else.
        """
        path = Path(path)
        if not path.is_file():
            raise InputError(f"{path}: there is no such file")
        with damage_said(f"{path}: not a safetensors file, or incomplete"), safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        if metadata.get("format") != FILE_FORMAT:
            raise InputError(f"{path}: holds no trained aggregators (expected format {FILE_FORMAT!r})")
        with damage_said(f"{path}: its description of aggregators is damaged"):
            description = json.loads(metadata["aggregators"])
            return cls(
                name=description["name"],
                options=description["options"],
                feature_dim=description["feature_dim"],
                seeds=tuple(description["seeds"]),
                validation_auc=np.asarray(description["validation_auc"], dtype=np.float64),
                best_epoch=np.asarray(description["best_epoch"], dtype=np.int64),
                history=description["history"],
                state=state,
            )


def bag_aucs(labels: NDArray[np.int64], scores: NDArray[np.float32]) -> NDArray[np.float64]:
    """AUC of each row of scores (S, bags): the share of pairs in the right order; ties count one half."""
    positive = labels == 1
    positives, negatives = int(positive.sum()), int((~positive).sum())
    ranks: NDArray[np.float64] = rankdata(scores, axis=1)[:, positive].sum(axis=1)
    return (ranks - positives * (positives + 1) / 2) / (positives * negatives)


def balanced_weights(labels: Tensor, use: Tensor) -> Tensor:
    """Weights (M, bags) of a loss that sum to one, half of it on each class, over the bags in use (M, bags)."""
    positive = labels.bool() & use
    negative = ~labels.bool() & use
    return (
        positive / positive.sum(1, keepdim=True).clamp(min=1) + negative / negative.sum(1, keepdim=True).clamp(min=1)
    ) / 2


def balanced_log_loss(labels: NDArray[np.int64], probability: NDArray[np.float64]) -> NDArray[np.float64]:
    """(bags,) what each bag adds to the log loss in which both classes weigh the same; its sum is the loss."""
    weight = np.where(labels == 1, 0.5 / max((labels == 1).sum(), 1), 0.5 / max((labels == 0).sum(), 1))
    right: NDArray[np.float64] = np.where(labels == 1, probability, 1 - probability)
    loss: NDArray[np.float64] = -weight * np.log(np.clip(right, 1e-12, None))
    return loss

"""Models of torchmil as aggregators: `torchmil:ABMIL`, `torchmil:TransMIL`, and so on.

They see one bag at a time, without padding, so a bag gives the same answer alone and in a batch even if the model does
not support masks. Seeds are trained one after the other (`stackable` is false). A model is trained with its own losses.
If it has an instance classifier, that gives the instance scores. Otherwise the score of an instance is the bag
prediction for that instance alone: attention says how much an instance counts, but not for which label.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from its2clr.aggregators.base import Aggregator, BagOutput, checked_options
from its2clr.errors import InputError
from its2clr.wording import did_you_mean

PREFIX = "torchmil:"
INSTANCE_CLASSIFIERS = ("DSMIL",)
"""Models whose `predict(return_inst_pred=True)` returns instance logits."""
ATTENTION = ("ABMIL", "CLAM_SB", "TransformerABMIL")
"""Models whose `predict(return_inst_pred=True)` returns attention before the softmax."""
_ASKS_FOR_MASK = ("DTFDMIL",)
_NOT_OPTIONS = ("in_shape", "feat_ext", "criterion")
_NEEDS = {"adj": "a graph of each bag (`adj`)", "coords": "the places of the instances (`coords`)"}
_REFUSED = {
    "IIBMIL": "its instance loss needs prototypes that only its own training loop updates (`update_prototypes`)",
    "VAEABMIL": "it needs its own variational autoencoder as feature extractor",
}
_ALONE = 4096
"""How many single instances are predicted in one pass."""


def torchmil_names() -> list[str]:
    """Sorted names of the usable models, with their prefix; none if torchmil is not installed."""
    try:
        models = _models()
    except InputError:
        return []
    return [f"{PREFIX}{name}" for name in sorted(models) if _refusal(name, models[name]) is None]


def create_torchmil(name: str, feature_dim: int, options: Mapping[str, Any]) -> "TorchmilAggregator":
    """Make the aggregator with a name like `torchmil:ABMIL`.

    Raises:
        InputError: torchmil is not installed or has no such model, the model needs more than features, or an option is
            wrong.
    """
    wanted = name.removeprefix(PREFIX)
    models = _models()
    if wanted not in models:
        known = ", ".join(torchmil_names())
        raise InputError(f"unknown aggregator {name!r}{did_you_mean(wanted, models)} (torchmil has: {known})")
    refusal = _refusal(wanted, models[wanted])
    if refusal is not None:
        raise InputError(f"aggregator {name!r} cannot be used: {refusal}; use one of {', '.join(torchmil_names())}")
    checked = checked_options(name, models[wanted], options, _NOT_OPTIONS)
    try:
        model = models[wanted](in_shape=(feature_dim,), **checked)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise InputError(f"aggregator {name!r} with options {dict(options)}: {error}") from error
    return TorchmilAggregator(feature_dim, model, wanted)


class TorchmilAggregator(Aggregator):
    """A model of torchmil behind the contract of `Aggregator`.

    Args:
        feature_dim: number D of features of an instance.
        model: the model.
        name: its name in torchmil.
    """

    stackable = False
    takes_labels = True

    def __init__(self, feature_dim: int, model: Any, name: str) -> None:
        super().__init__(feature_dim)
        self.model = model
        self.name = name

    def forward(self, features: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> BagOutput:
        """See `Aggregator.forward`; with labels (B,), the output carries the model's own loss."""
        if labels is None:
            return super().forward(features, mask)
        real = torch.ones_like(features[..., 0], dtype=torch.bool) if mask is None else mask
        bags = zip(features, real, labels, strict=True)
        found = [self._bag_loss(bag[kept], label) for bag, kept, label in bags]
        return BagOutput(
            bag_logit=torch.stack([logit for logit, _ in found]),
            instance_logits=torch.zeros_like(features[..., 0]),  # not needed in training
            attention=None,
            loss=self.mean_over_bags(torch.stack([loss for _, loss in found]), labels),
        )

    def aggregate(self, features: Tensor, mask: Tensor) -> BagOutput:
        """See `Aggregator.aggregate`."""
        logits, instances, weights = [], [], []
        for bag, kept in zip(features, mask, strict=True):
            rows = kept.nonzero().squeeze(-1)
            bag_logit, instance_logits, attention = self._bag(bag[rows])
            logits.append(bag_logit)
            instances.append(_spread(instance_logits, rows, len(kept)))
            weights.append(None if attention is None else _spread(attention, rows, len(kept)))
        attention = None if weights[0] is None else torch.stack([one for one in weights if one is not None])
        return BagOutput(torch.stack(logits), torch.stack(instances), attention)

    def loss(self, output: BagOutput, labels: Tensor) -> Tensor:
        """The model's own loss if it was given the labels; otherwise the cross-entropy of the bag predictions."""
        return super().loss(output, labels) if output.loss is None else output.loss

    def _bag_loss(self, bag: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Bag logit and the sum of the model's losses, for one bag (K, D)."""
        with self._numpy_draws():
            logit, losses = self.model.compute_loss(label.view(1), bag.unsqueeze(0), **self._mask(bag.unsqueeze(0)))
        return logit.reshape(()), torch.stack([one.reshape(()) for one in losses.values()]).sum()

    def _bag(self, bag: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Bag logit, instance logits (K,) and attention (K,) of one bag (K, D)."""
        if self.name in INSTANCE_CLASSIFIERS + ATTENTION:
            logit, found = self._predict(bag.unsqueeze(0), return_inst_pred=True)
            if self.name in INSTANCE_CLASSIFIERS:
                return logit.reshape(()), found.reshape(-1), None
            return logit.reshape(()), self._alone(bag), found.reshape(-1).softmax(dim=0)
        return self._predict(bag.unsqueeze(0), return_inst_pred=False).reshape(()), self._alone(bag), None

    def _alone(self, bag: Tensor) -> Tensor:
        """The bag prediction (K,) for each instance alone."""
        parts = torch.split(bag.unsqueeze(1), _ALONE)
        return torch.cat([self._predict(part, return_inst_pred=False).reshape(-1) for part in parts])

    def _predict(self, bags: Tensor, *, return_inst_pred: bool) -> Any:
        with self._numpy_draws():
            return self.model.predict(bags, **self._mask(bags), return_inst_pred=return_inst_pred)

    def _mask(self, bags: Tensor) -> dict[str, Tensor]:
        """An argument for models that fail without a mask."""
        return {"mask": torch.ones_like(bags[..., 0], dtype=torch.bool)} if self.name in _ASKS_FOR_MASK else {}

    @contextmanager
    def _numpy_draws(self) -> Iterator[None]:
        """Some models draw from numpy's global generator: seed it for training, and fix it for predictions."""
        state = np.random.get_state()  # noqa: NPY002
        np.random.seed(int(torch.randint(2**31, ())) if self.training else 0)  # noqa: NPY002
        try:
            yield
        finally:
            np.random.set_state(state)  # noqa: NPY002


def _spread(values: Tensor, rows: Tensor, length: int) -> Tensor:
    """Values of a bag's instances in their rows of the padded bag; zero elsewhere."""
    return values.new_zeros(length).index_copy(0, rows, values)


def _models() -> dict[str, type[nn.Module]]:
    """The models of torchmil by name.

    Raises:
        InputError: torchmil is not installed.
    """
    try:
        from torchmil import models
    except ImportError as error:
        raise InputError(f"this aggregator needs torchmil: pip install 'its2clr[torchmil]' ({error})") from error
    return {
        name: value
        for name, value in vars(models).items()
        if inspect.isclass(value) and issubclass(value, nn.Module) and not name.startswith("MILModel")
    }


def _refusal(name: str, model: type[nn.Module]) -> str | None:
    """Why a model cannot be an aggregator; None if it can."""
    if name in _REFUSED:
        return _REFUSED[name]
    for argument in inspect.signature(model.forward).parameters:
        if argument in _NEEDS:
            return f"it needs {_NEEDS[argument]}, but aggregators get only features"
    return None

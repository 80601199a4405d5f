"""The contract of all aggregators, and the registry that makes one from its name."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, get_type_hints

import torch
import torch.nn.functional as F
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor, nn

from its2clr.errors import InputError
from its2clr.registry import Registry
from its2clr.wording import did_you_mean

Dropout = Annotated[float, Field(ge=0.0, lt=1.0, description="share of values dropped in training")]
"""An option of several aggregators."""


class BagOutput(NamedTuple):
    """What an aggregator says about a batch of bags.

    Attributes:
        bag_logit: (B,) logit of the probability that the bag is positive.
        instance_logits: (B, K) logits of the instances; -inf on padding.
        attention: (B, K) weights that sum to one over a bag's instances, 0 on padding; None if the aggregator has none.
        loss: scalar, the aggregator's own loss if it was given the labels; None otherwise.
        streams: (B, streams) logits of several classifiers of the bag, if the loss is of them; None otherwise.
    """

    bag_logit: Tensor
    instance_logits: Tensor
    attention: Tensor | None
    loss: Tensor | None = None
    streams: Tensor | None = None


class Aggregator(nn.Module, ABC):
    """Base of all aggregators; a new one implements `aggregate` and, if needed, `loss`.

    A bag gives the same answer alone and padded in a batch, whatever values the padded rows hold: `forward` zeroes
    these rows before `aggregate` sees them, and masks their logits and attention afterwards. `aggregate` itself must
    never choose, attend to or average a position whose mask is False.

    `aggregate` and `loss` run under `torch.func.vmap`, so they must have no control flow that depends on values and
    must change no argument in place. If `stackable` is false, seeds run one after the other and this does not apply.

    Args:
        feature_dim: number D of features of an instance.

    Attributes:
        stackable: whether several seeds can run as one, under vmap and recorded as CUDA graphs.
        takes_labels: whether `forward` takes the labels in training, to return its own loss.
        positive_weight: how often a positive bag counts in the loss; set by the training.
    """

    stackable: ClassVar[bool] = True
    takes_labels: ClassVar[bool] = False
    positive_weight: float = 1.0

    def __init__(self, feature_dim: int) -> None:
        super().__init__()
        if feature_dim < 1:
            raise InputError(f"feature_dim must be at least 1, got {feature_dim}")
        self.feature_dim = feature_dim

    def forward(self, features: Tensor, mask: Tensor | None = None) -> BagOutput:
        """Predict a batch of bags.

        Args:
            features: (B, K, D) instance features, padded to the same K.
            mask: (B, K) True for real instances, at least one per bag; None if all are real.

        Returns:
            Logits of the bags and of the instances, and the attention.
        """
        if features.dim() != 3 or features.shape[-1] != self.feature_dim:
            raise InputError(
                f"expected features of shape (bags, instances, {self.feature_dim}), got {tuple(features.shape)}"
            )
        if mask is None:
            return self.aggregate(features, torch.ones_like(features[..., 0], dtype=torch.bool))
        if mask.shape != features.shape[:2] or mask.dtype != torch.bool:
            raise InputError(
                f"expected a boolean mask of shape {tuple(features.shape[:2])}, "
                f"got {mask.dtype} of shape {tuple(mask.shape)}"
            )
        padding = ~mask
        # masked_fill, not a product: 0 * nan would be nan, forward and backward.
        output = self.aggregate(features.masked_fill(padding.unsqueeze(-1), 0.0), mask)
        return output._replace(
            instance_logits=output.instance_logits.masked_fill(padding, -torch.inf),
            attention=None if output.attention is None else output.attention.masked_fill(padding, 0.0),
        )

    @abstractmethod
    def aggregate(self, features: Tensor, mask: Tensor) -> BagOutput:
        """Predict a batch of bags whose padded rows are zero.

        Args:
            features: (B, K, D) instance features.
            mask: (B, K) True for real instances.
        """

    def loss(self, output: BagOutput, labels: Tensor) -> Tensor:
        """Mean binary cross-entropy of the bag predictions.

        Args:
            output: what `forward` returned.
            labels: (B,) 0 or 1.

        Returns:
            A scalar.
        """
        return self.cross_entropy(output.bag_logit, labels)

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean binary cross-entropy of logits (B,) of bags; a positive bag counts `positive_weight` times."""
        labels = labels.to(logits.dtype)
        return self.mean_over_bags(cross_entropies(logits, labels), labels)

    def mean_over_bags(self, losses: Tensor, labels: Tensor) -> Tensor:
        """Mean of the losses (B,) of bags; that of a positive bag counts `positive_weight` times."""
        if self.positive_weight != 1:
            losses = losses * (1 + (self.positive_weight - 1) * labels)
        return losses.mean()


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Binary cross-entropy of every logit, for labels 0 and 1.

    It is one operation, where vmap takes the library's apart into fifteen; a step on a GPU takes as long as it has
    operations.
    """
    return F.softplus((1 - 2 * labels) * logits)


AGGREGATORS: Registry[type[Aggregator]] = Registry(
    "aggregator",
    {
        "attention": "its2clr.aggregators.attention",
        "dsmil": "its2clr.aggregators.dsmil",
        "instance_attention": "its2clr.aggregators.attention",
        "log_mean_exp": "its2clr.aggregators.log_mean_exp",
        "max": "its2clr.aggregators.pooling",
        "smooth_max": "its2clr.aggregators.pooling",
        "top_k": "its2clr.aggregators.pooling",
        "transformer": "its2clr.aggregators.transformer",
    },
)
register = AGGREGATORS.register
"""Class decorator that makes an aggregator available under a name.

The class is constructed as `cls(feature_dim, **options)`: its keyword arguments are its options, and their annotations
(pydantic constraints included) are checked by `create_aggregator`.
"""
aggregator_names = AGGREGATORS.names


def create_aggregator(name: str, feature_dim: int, **options: Any) -> Aggregator:
    """Make an aggregator from its name.

    Args:
        name: one of `aggregator_names()`, or a model of torchmil such as `torchmil:ABMIL`.
        feature_dim: number of features of an instance.
        **options: keyword arguments of that aggregator.

    Raises:
        InputError: the name or an option is unknown, or the value of an option is not allowed.
    """
    if name.startswith("torchmil:"):
        from its2clr.aggregators.torchmil_models import create_torchmil

        return create_torchmil(name, feature_dim, options)
    cls = AGGREGATORS.find(name, also=", and models of torchmil such as torchmil:ABMIL")
    return cls(feature_dim, **checked_options(name, cls, options, ("feature_dim",)))


def checked_options(
    name: str, cls: type[nn.Module], options: Mapping[str, Any], hidden: Sequence[str]
) -> dict[str, Any]:
    """Options of an aggregator, checked against the annotations of its constructor.

    Args:
        name: name of the aggregator, for messages.
        cls: its class.
        options: the given options.
        hidden: arguments of the constructor that are not options.

    Raises:
        InputError: an option is unknown, or its value is not allowed.
    """
    known = [option for option in inspect.signature(cls).parameters if option not in hidden]
    hints = get_type_hints(cls.__init__, include_extras=True)
    checked: dict[str, Any] = {}
    for option, value in options.items():
        if option not in known:
            raise InputError(
                f"unknown option {option!r} of aggregator {name!r}{did_you_mean(option, known)} "
                f"(known: {', '.join(known) or 'none'})"
            )
        try:
            checked[option] = TypeAdapter(hints.get(option, Any)).validate_python(value)
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise InputError(f"option {option!r} of aggregator {name!r}: {problem}, got {value!r}") from error
    return checked


def logit_of_mean_probability(logits: Tensor, log_weights: Tensor) -> Tensor:
    r"""Logit of $p = \sum_k w_k \sigma(z_k)$ for weights that sum to one.

    Both $\log p$ and $\log(1 - p)$ are sums of positive terms in log space, so nothing cancels or saturates, even for
    very large logits.

    Args:
        logits: (..., K) finite logits z.
        log_weights: (..., K) log w, -inf for entries that do not count.

    Returns:
        (...,) $\log p - \log(1 - p)$.
    """
    log_positive = torch.logsumexp(log_weights + F.logsigmoid(logits), dim=-1)
    log_negative = torch.logsumexp(log_weights + F.logsigmoid(-logits), dim=-1)
    return log_positive - log_negative

"""What a batch of the refinement is: rows from the pools, their pseudo labels, and which are anchors."""

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from its2clr.bags import Bags
from its2clr.config import RefineConfig
from its2clr.errors import TrainingError
from its2clr.refine.labels import InstanceLabels
from its2clr.refine.pacing import Pacing
from its2clr.refine.pseudo_labels import Indices, Pools, partition
from its2clr.seeds import numpy_generator
from its2clr.training import Batches


def epoch_pools(labels: InstanceLabels | None, train: Bags, config: RefineConfig, epoch: int) -> Pools:
    """The instances an epoch (1 to T) may use, as section 3.2 selects them.

    With self-pacing, the warm-up uses all pseudo-positives and the instances of negative bags; later epochs use the
    most confident share r. Without self-pacing, or with true labels, every label is used from the first epoch on.

    Args:
        labels: Labels of the training instances.
        train: Training bags.
        config: Settings of Algorithm 1.
        epoch: 1 to T.
    """
    assert labels is not None, "the first round always passes the gate, so there are labels"
    pacing = Pacing(config.initial_ratio, config.final_ratio, config.warmup_epochs, config.epochs)
    warming_up = is_warm_up(config, epoch)
    bag = train.bag_of_instance
    pools = partition(
        labels.probabilities,
        train.labels[bag],
        labels.threshold,
        ratio=pacing.ratio(epoch) if is_paced(config) and not warming_up else 1.0,
        bag_ids=bag,
        most_negatives=config.pseudo_negatives if config.labels == "pseudo" else 1.0,
        top_instance=config.top_instance and config.labels == "pseudo",
    )
    return pools._replace(pseudo_negative=pools.pseudo_negative[:0]) if warming_up else pools


def is_paced(config: RefineConfig) -> bool:
    """Whether only the most confident labels are used; true labels need no pacing."""
    return config.self_paced and config.labels == "pseudo"


def is_warm_up(config: RefineConfig, epoch: int) -> bool:
    """Whether an epoch (1 to T) belongs to the warm-up."""
    return is_paced(config) and epoch <= config.warmup_epochs


def epoch_batches(pools: Pools, config: RefineConfig, epoch: int, steps: int, batch_size: int, seed: int) -> Batches:
    """The batches of an epoch (1 to T)."""
    return sample_batches(
        pools,
        steps,
        batch_size,
        config.positive_fraction,
        numpy_generator(seed, "refine batches", epoch),
        warmup_anchors=config.warmup_anchors if is_warm_up(config, epoch) else None,
    )


def sample_batches(
    pools: Pools,
    steps: int,
    batch_size: int,
    positive_fraction: float,
    generator: np.random.Generator,
    warmup_anchors: Literal["negative", "positive"] | None = None,
) -> Batches:
    """Draw the batches of one epoch.

    A share `positive_fraction` of every batch comes from the pseudo-positives, the rest from the negatives. Rows of the
    batch with the anchor's own pseudo label are its same-set S_x, the others its different-set D_x.

    In the warm-up all negatives come from negative bags, and `warmup_anchors` says whether negatives or positives are
    the anchors (in the paper: negatives). After the warm-up (None) the selected pseudo-negatives join the negatives,
    and every row is an anchor, so `positive_fraction` of the anchors are positive.

    Args:
        pools: The pools of this epoch.
        steps: Batches to draw.
        batch_size: Rows per batch.
        positive_fraction: p_+.
        generator: Source of randomness.
        warmup_anchors: Which rows are anchors in the warm-up; None after it.

    Raises:
        TrainingError: There are no positives or no negatives.
    """
    negatives = pools.negative_bag
    if warmup_anchors is None:
        negatives = np.concatenate([pools.negative_bag, pools.pseudo_negative])
    if len(pools.pseudo_positive) == 0:
        raise TrainingError(
            "no instance of a positive bag passes the threshold, so there are no positives to refine with; set a lower "
            "refine.threshold, or refine.threshold_rule=negative_bags, or refine.top_instance=true"
        )
    if len(negatives) == 0:
        raise TrainingError("refinement needs negative instances; the training split must hold negative bags")
    positive_rows = min(max(round(positive_fraction * batch_size), 1), batch_size - 1)
    positives = cycle(pools.pseudo_positive, steps * positive_rows, generator).reshape(steps, -1)
    rest = cycle(negatives, steps * (batch_size - positive_rows), generator).reshape(steps, -1)
    labels = np.zeros((steps, batch_size), dtype=np.int64)
    labels[:, :positive_rows] = 1
    anchors = np.ones((steps, batch_size), dtype=bool)
    if warmup_anchors is not None:
        anchors = labels == (1 if warmup_anchors == "positive" else 0)
    # Shuffling the columns once spreads the positives evenly over several processes.
    columns = generator.permutation(batch_size)
    indices = np.concatenate([positives, rest], axis=1)
    return Batches(*(torch.from_numpy(part[:, columns].copy()) for part in (indices, labels, anchors)))


def cycle(pool: Indices, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """`count` draws in which every member comes equally often: random orders of the pool, one after another."""
    rounds = -(-count // len(pool))
    return np.concatenate([generator.permutation(pool) for _ in range(rounds)])[:count]

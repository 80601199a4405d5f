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

    Self-paced: in the warm-up, all pseudo-positives against the negative bags; after it the most confident share r.
    Without self-pacing, and with true labels: every label from the first epoch on.

    Args:
        labels: Of the training instances.
        train: Training bags.
        config: Settings of Algorithm 1.
        epoch: 1 to T.
    """
    assert labels is not None, "the first round passes the gate, so there are labels"
    pacing = Pacing(config.initial_ratio, config.final_ratio, config.warmup_epochs, config.epochs)
    warming_up = is_warm_up(config, epoch)
    bag = train.bag_of_instance
    pools = partition(
        labels.probabilities,
        train.labels[bag],
        labels.threshold,
        ratio=pacing.ratio(epoch) if is_paced(config) and not warming_up else 1.0,
        bag_ids=bag,
    )
    return pools._replace(pseudo_negative=pools.pseudo_negative[:0]) if warming_up else pools


def is_paced(config: RefineConfig) -> bool:
    """Whether pseudo labels are taken up by confidence; true labels need no pacing."""
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

    A share `positive_fraction` of every batch comes from the pseudo-positives, the rest from the negatives. Within
    the batch, the rows of an anchor's pseudo label are its same-set S_x, the others its different-set D_x.

    In the warm-up the negatives are negative-bag instances only and `warmup_anchors` says which side is anchors
    ("negative" in the paper). After it (None) the negatives are the negative-bag instances together with the
    selected pseudo-negatives, and every row is an anchor, so `positive_fraction` of the anchors are positive.

    Args:
        pools: The pools of this epoch.
        steps: Batches to draw.
        batch_size: Rows per batch.
        positive_fraction: p_+.
        generator: Source of randomness.
        warmup_anchors: Side that is anchors during the warm-up; None after it.

    Raises:
        TrainingError: A pool that is needed is empty.
    """
    negatives = pools.negative_bag
    if warmup_anchors is None:
        negatives = np.concatenate([pools.negative_bag, pools.pseudo_negative])
    if len(negatives) == 0 or len(pools.pseudo_positive) == 0:
        raise TrainingError(
            f"refinement needs instances of both kinds, got {len(pools.pseudo_positive)} pseudo-positive and "
            f"{len(negatives)} negative: the training split needs positive and negative bags"
        )
    positive_rows = min(max(round(positive_fraction * batch_size), 1), batch_size - 1)
    positives = cycle(pools.pseudo_positive, steps * positive_rows, generator).reshape(steps, -1)
    rest = cycle(negatives, steps * (batch_size - positive_rows), generator).reshape(steps, -1)
    labels = np.zeros((steps, batch_size), dtype=np.int64)
    labels[:, :positive_rows] = 1
    anchors = np.ones((steps, batch_size), dtype=bool)
    if warmup_anchors is not None:
        anchors = labels == (1 if warmup_anchors == "positive" else 0)
    # One shuffle of the columns spreads the positives over the shares of several processes.
    columns = generator.permutation(batch_size)
    indices = np.concatenate([positives, rest], axis=1)
    return Batches(*(torch.from_numpy(part[:, columns].copy()) for part in (indices, labels, anchors)))


def cycle(pool: Indices, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """`count` draws that use every member equally often: random orders of the pool, one after the other."""
    rounds = -(-count // len(pool))
    return np.concatenate([generator.permutation(pool) for _ in range(rounds)])[:count]

"""The witness rate from bag labels alone: the share of instances in positive bags that negative bags do not have.

The instances of positive bags are a mixture: a share w of positives, the rest like the instances of negative bags,
which are all negative. So for any score c, P(score <= c | positive bag) >= (1 - w) P(score <= c | negative bag), with
equality where no positive scores that low. The smallest ratio of the two is 1 - w; the best bin (Garg et al., Mixture
proportion estimation and PU learning, NeurIPS 2021) is chosen by an upper bound, so that ratios of few instances do not
count.
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from its2clr.errors import InputError
from its2clr.evaluation.arrays import label_vector, vector

CONFIDENCE = 0.1
"""Chance that the bound that chooses the bin does not hold."""


def estimate_witness_rate(scores: ArrayLike, bag_labels_per_instance: ArrayLike) -> float:
    """Gives an estimate of the share of positives among the instances of positive bags.

    It can only see positives that the scores tell from negatives, so poor scores make it too small. It takes what all
    instances of positive bags share (a stain, a scanner) for witnesses.

    Args:
        scores: (N,) of instances the scoring model was not trained on, such as those of validation bags; higher is
            more positive.
        bag_labels_per_instance: (N,) label of each instance's bag.

    Raises:
        InputError: If bags of one label are missing.
    """
    values = vector(scores, "scores", np.size(scores))
    labels = label_vector(bag_labels_per_instance, "bag labels per instance", values.size)
    negative, positive = np.sort(values[labels == 0]), np.sort(values[labels == 1])
    if not (negative.size and positive.size):
        raise InputError("an estimate of the witness rate needs instances of both positive and negative bags")
    below = np.searchsorted(negative, negative, side="right") / negative.size
    mixed = np.searchsorted(positive, negative, side="right") / positive.size
    slack = sum(math.sqrt(math.log(4 / CONFIDENCE) / (2 * group.size)) for group in (negative, positive))
    best = int(np.argmin((mixed + slack) / below))
    return float(np.clip(1 - mixed[best] / below[best], 0.0, 1.0))

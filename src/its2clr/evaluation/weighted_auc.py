"""The AUC of many resamples of bags at once.

By hand because it must be faster than a library: sorting happens once, not once per resample. The AUC is a
count of pairs, and pairs group by bag. With U[i, j] the number of (positive of bag i, negative of bag j) that
are ranked right (ties count one half), P[i] and N[j] the positives and negatives of each bag, and w[b] how
often bag b was drawn,

    AUC(w) = sum_ij w_i w_j U_ij / (sum_i w_i P_i * sum_j w_j N_j).

U is averaged over retrainings before the resamples are looked at: the mean AUC needs no more than one AUC.
"""

import numpy as np
from numpy.typing import NDArray

_CELLS = 4_000_000  # of U held at once


def resampled_auc(
    labels: NDArray[np.int64],
    scores: NDArray[np.float64],
    bags: NDArray[np.int64],
    weights: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Gives, for each resample, the mean over retrainings of the AUC with bags counted by weight.

    Args:
        labels: (N,) instance labels, 0 or 1.
        scores: (S, N) scores of S retrainings.
        bags: (N,) which bag each instance belongs to, 0 to B - 1, in rising order.
        weights: (R, B) how often each resample drew each bag.

    Returns:
        (R,), nan where a resample holds only one class.
    """
    positive, negative = labels == 1, labels == 0
    positive_bags, positive_starts = np.unique(bags[positive], return_index=True)
    negative_bags, negative_starts = np.unique(bags[negative], return_index=True)
    negative_ends = np.append(negative_starts[1:], int(negative.sum()))
    positive_scores, negative_scores = scores[:, positive], scores[:, negative]  # (S, P), (S, N)
    positive_weights = weights[:, positive_bags]

    right = np.zeros(weights.shape[0])
    step = max(1, _CELLS // max(1, positive_bags.size))
    for first in range(0, negative_bags.size, step):
        chunk = slice(first, first + step)
        pairs = np.zeros((positive_bags.size, negative_bags[chunk].size))  # U of the formula
        for column, (start, end) in enumerate(zip(negative_starts[chunk], negative_ends[chunk], strict=True)):
            ranked = _ranked_right(positive_scores, negative_scores[:, start:end])  # (P,)
            pairs[:, column] = np.add.reduceat(ranked, positive_starts)
        right += ((positive_weights @ pairs) * weights[:, negative_bags[chunk]]).sum(axis=1)

    bag_count = weights.shape[1]
    positives = weights @ np.bincount(bags[positive], minlength=bag_count)
    negatives = weights @ np.bincount(bags[negative], minlength=bag_count)
    total = positives * negatives
    auc = np.full(right.shape, np.nan)
    np.divide(right, total, out=auc, where=total > 0)
    return auc


def _ranked_right(positives: NDArray[np.float64], negatives: NDArray[np.float64]) -> NDArray[np.float64]:
    """Gives for each positive how many negatives lie below it (ties one half), averaged over retrainings."""
    below = np.zeros(positives.shape[1])
    for retraining, one_bag in zip(positives, negatives, strict=True):
        ordered = np.sort(one_bag)
        below += np.searchsorted(ordered, retraining, side="left")
        below += np.searchsorted(ordered, retraining, side="right")
    below /= 2 * positives.shape[0]
    return below

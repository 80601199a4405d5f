"""Features of many bags in one tensor, and the padded batches cut from it."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from its2clr.engine.mapped_rows import ROWS_AT_ONCE, give_back
from its2clr.errors import InputError


class BagFeatures:
    """The features of all instances, bag after bag, on one device.

    Args:
        features: (N, D) float32 features of all instances, bag after bag.
        offsets: (n_bags + 1,) int64; bag b holds rows `offsets[b]` to `offsets[b + 1] - 1`, at least one.
        labels: (n_bags,) 0 or 1; None if unknown.
        groups: (n_bags,) the group, such as the patient, of each bag; None: every bag is its own.

    Raises:
        InputError: shapes disagree, a bag is empty, a feature is not finite, or a label is not 0 or 1.
    """

    def __init__(
        self,
        features: Tensor,
        offsets: Tensor,
        labels: Tensor | None = None,
        groups: NDArray[np.str_] | None = None,
    ) -> None:
        offsets_on_cpu = offsets.detach().to("cpu", torch.int64)
        _check(features, offsets_on_cpu, labels)
        self.features = features
        self.offsets = offsets_on_cpu.to(features.device)
        self._spans = torch.stack([self.offsets[:-1], self.offsets[1:] - 1], dim=-1)  # first and last row of each bag
        self.labels = None if labels is None else labels.to(features.device, torch.float32)
        self.groups = groups
        # On the CPU, so that the length of a padded batch is known without waiting for the device.
        self.sizes: NDArray[np.int64] = offsets_on_cpu.diff().numpy()

    @classmethod
    def from_arrays(
        cls,
        bags: Sequence[ArrayLike | Tensor],
        labels: ArrayLike | Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> "BagFeatures":
        """Join bags that are given one by one.

        Args:
            bags: an array (K_b, D) per bag.
            labels: 0 or 1 for each bag.
            device: where the features are kept.
        """
        if not len(bags):
            raise InputError("no bags were given")
        tensors = [torch.as_tensor(bag).to(torch.float32) for bag in bags]
        for index, tensor in enumerate(tensors):
            if tensor.dim() != 2 or tensor.shape[1] != tensors[0].shape[-1]:
                raise InputError(
                    f"bag {index} has features of shape {tuple(tensor.shape)}, "
                    f"expected (instances, {tensors[0].shape[-1]}) like the first bag"
                )
        offsets = torch.tensor([0, *(len(tensor) for tensor in tensors)]).cumsum(0)
        return cls(torch.cat(tensors).to(device), offsets, None if labels is None else torch.as_tensor(labels))

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def feature_dim(self) -> int:
        """Number D of features of an instance."""
        return self.features.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the features are."""
        return self.features.device

    def to(self, device: torch.device | str) -> "BagFeatures":
        """The same bags on another device."""
        return BagFeatures(self.features.to(device), self.offsets, self.labels, self.groups)

    def rows(self, bag_indices: Tensor, length: int | None = None) -> tuple[Tensor, Tensor]:
        """The rows of `features` that hold the instances of some bags.

        Args:
            bag_indices: (...,) indices of bags.
            length: K to pad to; None: the size of the largest of these bags.

        Returns:
            (..., K) row numbers (padding repeats the bag's last row), and the mask (..., K), False on padding.
        """
        if length is None:
            length = int(self.sizes[bag_indices.cpu().numpy()].max())
        bag_indices = bag_indices.to(self.device)
        first, last = self._spans[bag_indices].split(1, dim=-1)  # type: ignore[no-untyped-call]
        rows = first + torch.arange(length, device=self.device)
        return torch.minimum(rows, last), rows <= last

    def batch(self, bag_indices: Tensor, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Padded features of some bags.

        Args:
            bag_indices: (...,) indices of bags.
            length: K to pad to; None: the size of the largest of these bags.

        Returns:
            Features (..., K, D), with any values on padding, and the mask (..., K), False on padding.
        """
        rows, mask = self.rows(bag_indices, length)
        return self.at(rows), mask

    def at(self, rows: Tensor) -> Tensor:
        """Features (..., D) of the instances in these rows (...)."""
        features = self.features.index_select(0, rows.reshape(-1))
        give_back()
        return features.reshape(*rows.shape, self.feature_dim)

    def batches(self, bags_per_batch: int, instances_per_batch: int) -> list[Tensor]:
        """Indices of all bags in batches of similar size, so that there is little padding.

        Args:
            bags_per_batch: largest number of bags in a batch.
            instances_per_batch: largest number of instances in a batch, with padding; a larger bag gets its own batch.
        """
        order = np.argsort(self.sizes, kind="stable")
        starts = [0]
        for position, size in enumerate(self.sizes[order]):
            bags = position - starts[-1] + 1  # sizes grow, so all bags so far are padded to this size
            if bags > 1 and (bags > bags_per_batch or bags * size > instances_per_batch):
                starts.append(position)
        return [torch.from_numpy(order[start:end]) for start, end in pairwise([*starts, len(order)])]

    def beside(self, others: "BagFeatures") -> "BagFeatures":
        """The same bags with more features of every instance: these first, then those of `others`."""
        return BagFeatures(torch.cat([self.features, others.features], 1), self.offsets, self.labels, self.groups)

    def subset(self, bag_indices: ArrayLike | Tensor) -> "BagFeatures":
        """Some of the bags, in the given order."""
        chosen = torch.as_tensor(bag_indices, dtype=torch.int64).cpu()
        rows, mask = self.rows(chosen)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), mask.sum(-1).cpu().cumsum(0)])
        labels = None if self.labels is None else self.labels[chosen.to(self.device)]
        groups = None if self.groups is None else self.groups[chosen.numpy()]
        return BagFeatures(self.features[rows[mask]], offsets, labels, groups)


def _check(features: Tensor, offsets: Tensor, labels: Tensor | None) -> None:
    if features.dim() != 2 or features.dtype != torch.float32:
        raise InputError(
            f"expected float32 features of shape (instances, D), got {features.dtype} of shape {tuple(features.shape)}"
        )
    if offsets.dim() != 1 or len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(features):
        raise InputError(
            f"offsets must go from 0 to {len(features)}, the number of instances, and have one value more than bags"
        )
    empty = (offsets.diff() < 1).nonzero().flatten().tolist()
    if empty:
        raise InputError(f"bag {empty[0]} has no instances; leave empty bags out")
    for start in range(0, len(features), ROWS_AT_ONCE):
        finite = features[start : start + ROWS_AT_ONCE].isfinite().all(dim=1)
        give_back()
        if finite.all():
            continue
        row = start + int((~finite).nonzero()[0])
        bag = int(torch.searchsorted(offsets, row, right=True)) - 1
        raise InputError(f"bag {bag} has features that are not finite (row {row}); extract its features again")
    if labels is None:
        return
    if labels.shape != (len(offsets) - 1,):
        raise InputError(f"expected {len(offsets) - 1} labels, one per bag, got shape {tuple(labels.shape)}")
    wrong = ((labels != 0) & (labels != 1)).nonzero().flatten().tolist()
    if wrong:
        raise InputError(f"labels must be 0 or 1, but bag {wrong[0]} has {labels[wrong[0]].item()}")

"""The instances with the most similar features: within a bag, and in the test bags or an even sample of them."""

import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from its2clr.errors import InputError
from its2clr.viewer.bag_list import BagTable
from its2clr.viewer.shown import Shown

NEAREST = 8
MOST_BAGS = 400
MOST_VALUES = 32_000_000
"""Most numbers held per encoder, of the features of test instances: 128 MB."""

_HELD_BAGS = 8
_Unit = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class _Pool:
    """Test instances that are searched: which they are, and their features scaled to length one."""

    bag: NDArray[np.int64]
    instance: NDArray[np.int64]
    unit: _Unit
    bags: int
    bags_of: int
    instances_of: int


class Neighbours:
    """Searches the features that the run's encoders left.

    Args:
        shown: What is shown.
        table: Its bags.
    """

    def __init__(self, shown: Shown, table: BagTable) -> None:
        self._shown, self._table = shown, table
        self._pools: dict[str, _Pool] = {}
        self._unit = lru_cache(_HELD_BAGS)(self._read)
        self._lock = threading.Lock()

    def within(self, encoder: str, bag: int, instance: int) -> dict[str, Any]:
        """The nearest other instances of the same bag.

        Raises:
            InputError: The run holds no features of this bag by this encoder.
        """
        unit = self._unit(encoder, bag)
        similarity = unit @ unit[instance]
        similarity[instance] = -np.inf
        nearest = _largest(similarity, min(NEAREST, len(unit) - 1))
        found = [{"bag": bag, "instance": int(i), "similarity": float(similarity[i])} for i in nearest]
        return {"searched": f"the other {len(unit) - 1:,} instances of this bag", "found": found}

    def across(self, encoder: str, bag: int, instance: int) -> dict[str, Any]:
        """The nearest instances of other bags of the test split, as many as are held.

        Raises:
            InputError: The run holds no features of the bag or the test bags by this encoder.
        """
        pool = self._pool(encoder)
        similarity = pool.unit @ self._unit(encoder, bag)[instance]
        other = pool.bag != bag
        similarity[~other] = -np.inf
        nearest = _largest(similarity, min(NEAREST, int(other.sum())))
        found = [
            {"bag": int(pool.bag[i]), "instance": int(pool.instance[i]), "similarity": float(similarity[i])}
            for i in nearest
        ]
        searched = f"all {len(pool.bag):,} instances of the {pool.bags_of:,} test bags"
        if len(pool.bag) < pool.instances_of:
            searched = f"{len(pool.bag):,} of {pool.instances_of:,} instances"
            searched += f", evenly spaced in {pool.bags:,} of {pool.bags_of:,} test bags"
        own = ", this bag left out" if self._table.split[bag] == "test" else ""
        return {"searched": searched + own, "found": found}

    def _read(self, encoder: str, bag: int) -> _Unit:
        """Features of the instances of a bag, scaled to length one."""
        features = self._shown.features(encoder, self._table.bags[bag])
        length = np.linalg.norm(features, axis=1, keepdims=True)
        unit: _Unit = features / np.maximum(length, 1e-12)
        return unit

    def _pool(self, encoder: str) -> _Pool:
        with self._lock:
            if encoder not in self._pools:
                self._pools[encoder] = self._gather(encoder)
            return self._pools[encoder]

    def _gather(self, encoder: str) -> _Pool:
        every = np.array([n for n, split in enumerate(self._table.split) if split == "test"], dtype=np.int64)
        if not len(every):
            raise InputError("this run has no test bags")
        chosen = _spaced(every, MOST_BAGS)
        dimension = self._read(encoder, int(chosen[0])).shape[1]
        each = max(MOST_VALUES // (dimension * len(chosen)), 1)
        bags, instances, units = [], [], []
        for bag in chosen.tolist():
            unit = self._read(encoder, bag)
            kept = _spaced(np.arange(len(unit)), each)
            bags.append(np.full(len(kept), bag))
            instances.append(kept)
            units.append(unit[kept])
        total = sum(self._table.n_instances[bag] for bag in every.tolist())
        return _Pool(
            np.concatenate(bags), np.concatenate(instances), np.concatenate(units), len(chosen), len(every), total
        )


def _spaced(values: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """At most `most` of the values, evenly spaced."""
    if len(values) <= most:
        return values
    return values[np.linspace(0, len(values) - 1, most).round().astype(np.int64)]


def _largest(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Places of the largest values, the largest first."""
    if count <= 0:
        return np.empty(0, dtype=np.int64)
    top = np.argpartition(-values, count - 1)[:count]
    return top[np.argsort(-values[top], kind="stable")]

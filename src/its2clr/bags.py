"""A split as training may see it, and what all trainings of a run share."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from its2clr.cohort import Cohort
from its2clr.config import RunConfig
from its2clr.engine.devices import Engine
from its2clr.engine.workspace import Workspace
from its2clr.tile_store import TileStore


@dataclass(frozen=True)
class Bags:
    """One split: tiles and bag labels, but no instance labels and no test bags.

    Attributes:
        cohort: The bags of the split.
        engine: Says on which device the tiles are needed.
    """

    cohort: Cohort
    engine: Engine

    @cached_property
    def tiles(self) -> TileStore:
        """Tiles, bag after bag; decoded when first asked for."""
        return TileStore.from_cohort(self.cohort.without_labels(), self.engine)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """(bags + 1,) where each bag starts."""
        return self.cohort.offsets()

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """(bags,) bag labels."""
        return self.cohort.bags["label"].to_numpy(dtype=np.int64, copy=True)

    @cached_property
    def bag_ids(self) -> NDArray[np.str_]:
        """(bags,) names of the bags."""
        return self.cohort.bags["bag_id"].to_numpy(dtype=str)

    @cached_property
    def groups(self) -> NDArray[np.str_]:
        """(bags,) the group, such as the patient, of each bag."""
        return self.cohort.bags["group"].to_numpy(dtype=str)

    @property
    def bag_of_instance(self) -> NDArray[np.int64]:
        """(N,) position of each instance's bag."""
        return np.repeat(np.arange(len(self.labels), dtype=np.int64), np.diff(self.offsets))


@dataclass(frozen=True)
class Context:
    """What pretraining, refinement and end-to-end training of a run all need.

    Attributes:
        config: All settings.
        train: Training bags.
        validation: Validation bags.
        engine: Device and processes.
        run: Where checkpoints and metrics go.
    """

    config: RunConfig
    train: Bags
    validation: Bags
    engine: Engine
    run: Workspace

    @property
    def seed(self) -> int:
        """Seed that every random choice is derived from."""
        return self.config.seed

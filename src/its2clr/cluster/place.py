"""Where work is done: processes of this machine, jobs of Slurm, or the workers of a Dask scheduler."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from its2clr.errors import InputError

LOCAL, SLURM = "local", "slurm"


@dataclass(frozen=True)
class Cluster:
    """Where work is done.

    Attributes:
        where: `local`, `slurm`, or the address of a Dask scheduler.
        workers: How many to start; None: what suits the work. A scheduler has its own.
        slurm: Settings of Slurm's jobs, see `its2clr.cluster.slurm.SlurmJobs`.

    Raises:
        InputError: These do not go together.
    """

    where: str = LOCAL
    workers: int | None = None
    slurm: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise InputError(f"workers must be at least 1, got {self.workers}")
        if self.workers is not None and self.where not in {LOCAL, SLURM}:
            raise InputError("workers says how many to start; those of a Dask scheduler are started there")
        if self.slurm and self.where != SLURM:
            raise InputError("settings of Slurm's jobs need --cluster slurm")

    @property
    def is_local(self) -> bool:
        """Whether it is this machine."""
        return self.where == LOCAL


def can_spread() -> bool:
    """Whether the packages for several workers are installed."""
    return all(find_spec(name) for name in ("distributed", "cryptography"))

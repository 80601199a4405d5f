"""Lightning Fabric set up from the config and the launcher: one process, torchrun or Slurm."""

import logging
import os
import platform
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.strategies.ddp import DDPStrategy
from torch import Tensor, nn

from its2clr.config import EngineConfig
from its2clr.engine.progress import Progress, ProgressBar, TotalWork
from its2clr.errors import InputError, Its2clrError, TrainingError
from its2clr.launcher import launched_processes, started_by_srun, started_by_torchrun
from its2clr.seeds import derive_seed

T = TypeVar("T")

for _name in ("lightning.fabric", "lightning.pytorch"):  # they tell users of precisions and tensor cores
    logging.getLogger(_name).setLevel(logging.WARNING)
warnings.filterwarnings("ignore", "The `srun` command is available")  # on the head node of a cluster this is meant

COLLECTIVE_TIMEOUT = timedelta(days=2)
"""How long processes wait for each other; the first one trains aggregators while the others wait."""
PIXELS_WORTH_COMPILING = 4_000_000 * 224**2
"""Compiling takes half a minute and makes training on a GPU a third faster; with fewer pixels it does not pay off."""


class Engine:
    """Device, precision and processes of a run; the only class that uses Fabric.

    Without a launcher there is one process. Under `torchrun` or `srun` the engine joins the other processes: batches
    and extraction are divided among them, and only the first process writes.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        accelerator = config.accelerator
        if accelerator == "auto":
            accelerator = "cuda" if torch.cuda.is_available() else "cpu"
        elif accelerator == "cuda" and not torch.cuda.is_available():
            raise InputError("engine.accelerator=cuda, but no CUDA device is visible; use auto or cpu")
        precision = config.precision
        if precision == "auto":
            precision = "bf16-mixed" if accelerator == "cuda" else "32-true"
        devices, nodes = launched_processes()
        if accelerator == "cuda" and torch.cuda.device_count() < devices:
            raise InputError(
                f"{devices} processes were started on this node, but this one sees {torch.cuda.device_count()} GPU(s); "
                "start one process per GPU, each of which sees all (with Slurm --gpus-per-node, not --gpus-per-task)"
            )
        self.fabric = Fabric(
            accelerator=accelerator,
            devices=devices,
            num_nodes=nodes,
            precision=precision,
            plugins=_process_environment(devices),
            strategy=DDPStrategy(timeout=COLLECTIVE_TIMEOUT) if devices * nodes > 1 else "auto",
        )
        if devices * nodes > 1:
            self.fabric.launch()
        self.precision = precision
        self.extract_batch_size = config.extract_batch_size
        self.device: torch.device = self.fabric.device
        self.rank = self.fabric.global_rank
        self.world_size = self.fabric.world_size
        self.tiles, self.tile_folder = config.tiles, config.tile_folder
        self.records_steps = config.record_steps and self.device.type == "cuda"
        self._compile = config.compile
        self.bars = ProgressBar(enabled=self.is_writer)
        self.work: TotalWork | None = None
        """All encoder training of a run, where it is counted; every step adds to it."""
        self.memory: dict[Any, Any] | None = None
        """Decoded tiles that the next run can use too; None keeps nothing after a run."""

    @property
    def is_writer(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    @property
    def device_name(self) -> str:
        """Name of the GPU; or the processor of the machine and the number of its cores."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{platform.processor() or platform.machine()} CPU, {os.cpu_count()} cores"

    def autocast(self) -> AbstractContextManager[Any]:
        """Context for the run's precision, for a forward pass of a module that `set_up` did not wrap."""
        return self.fabric.autocast()

    def set_up(
        self, network: nn.Module, optimiser: torch.optim.Optimizer, *, shared_batch_norm: bool = True
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Wrap for precision and gradient averaging; with several GPUs, batch norm is synchronised."""
        if shared_batch_norm and self.world_size > 1 and self.device.type == "cuda":
            network = share_batch_norm(network)
        wrapped, wrapped_optimiser = self.fabric.setup(network, optimiser)
        return wrapped, wrapped_optimiser

    def compiles(self, pixels: int) -> bool:
        """Whether a training that will see this many pixels compiles its network first."""
        if self._compile == "auto":
            return self.device.type == "cuda" and self.world_size == 1 and pixels >= PIXELS_WORTH_COMPILING
        return self._compile == "always"

    def divisible_batch_size(self, stage: str, wanted: int) -> int:
        """The largest batch up to `wanted` that can be divided evenly among the processes, at least two tiles each.

        Raises:
            InputError: There is none.
        """
        size = wanted // self.world_size * self.world_size
        if size < 2 * self.world_size:
            raise InputError(
                f"{stage}: a batch of {wanted} tiles is too small for {self.world_size} process(es), which need two "
                f"tiles each; raise {stage}.batch_size, or use fewer processes or more training tiles"
            )
        return size

    def backward(self, loss: Tensor) -> None:
        """Backward pass with the run's precision."""
        self.fabric.backward(loss)

    def progress(self, name: str, total: int, unit: str = "steps") -> Progress:
        """A progress bar in the first process; silent in the others."""
        return self.bars.start(name, total, unit)

    def barrier(self) -> None:
        """Wait for every process."""
        self.fabric.barrier()

    def broadcast(self, value: T) -> T:
        """The first process's value, in every process."""
        return self.fabric.broadcast(value) if self.world_size > 1 else value

    def on_writer(self, work: Callable[[], T]) -> T:
        """Do work in the first process and send its result to all; if it fails, every process raises the error."""
        outcome: tuple[T | None, str | None] = (None, None)
        if self.is_writer:
            try:
                outcome = (work(), None)
            except (Its2clrError, OSError) as error:
                if self.world_size == 1:
                    raise
                outcome = (None, str(error))
        result, failure = self.broadcast(outcome)
        if failure is not None:
            raise TrainingError(failure)
        return result  # type: ignore[return-value]

    @contextmanager
    def own_random_state(self, *keys: int | str) -> Iterator[None]:
        """Seed the global random state from names inside the block; restore it afterwards."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(derive_seed(*keys))
            yield

    def share_buffers(self, network: nn.Module) -> None:
        """Send the first process's buffers (running statistics of batch norm) to all."""
        if self.world_size > 1:
            for buffer in network.buffers():
                torch.distributed.broadcast(buffer, src=0)

    def mean_over_processes(self, *values: Tensor | float) -> list[float]:
        """Mean of each number over processes; the same in all."""
        numbers = torch.stack([torch.as_tensor(value, dtype=torch.float64, device="cpu") for value in values])
        numbers = self.sum_over_processes(numbers.to(self.device)) / self.world_size
        return [float(number) for number in numbers.cpu()]

    def sum_over_processes(self, values: Tensor) -> Tensor:
        """Elementwise sum over processes, in every process."""
        if self.world_size > 1:
            torch.distributed.all_reduce(values)
        return values

    def say(self, message: str) -> None:
        """Print one line, from the first process only."""
        if self.is_writer:
            self.bars.print(message)


def share_batch_norm(network: nn.Module) -> nn.Module:
    """Make batch norm use the statistics of all processes."""
    from timm.layers.norm_act import (
        convert_sync_batchnorm,
    )  # torch's version drops activations that timm fuses into norms

    shared: nn.Module = convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]
    return shared


def _process_environment(processes_per_node: int) -> ClusterEnvironment:
    """How Fabric finds the other processes; by itself it would take a script of `sbatch` for a task of `srun`."""
    if started_by_torchrun():
        return TorchElasticEnvironment()
    if started_by_srun():
        job, step = int(os.environ["SLURM_JOB_ID"]), int(os.environ["SLURM_STEP_ID"])
        first_node = SLURMEnvironment.resolve_root_node_address(os.environ["SLURM_STEP_NODELIST"])
        os.environ["SLURM_NTASKS_PER_NODE"] = str(processes_per_node)  # Fabric asks for it; `srun -n 2` does not set it
        os.environ.setdefault("MASTER_ADDR", first_node)  # Fabric takes the first node of the job, not of the step
        os.environ.setdefault("MASTER_PORT", str(15_000 + (job + 101 * step) % 10_000))  # steps may share a node
        if int(os.environ["SLURM_STEP_NUM_TASKS"]) > 1:
            _check_that_it_is_known(os.environ["MASTER_ADDR"])
        return SLURMEnvironment()
    return LightningEnvironment()


def _check_that_it_is_known(address: str) -> None:
    """Processes would ask for days where a node that has no such name is."""
    try:
        socket.getaddrinfo(address, None)
    except OSError as error:
        raise InputError(
            f"the first node of this step, {address}, is not known by that name here ({error}); "
            "set MASTER_ADDR to its address before srun"
        ) from error

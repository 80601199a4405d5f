"""How this process was started: alone, or beside others by torchrun or by Slurm's `srun`."""

import os

from its2clr.errors import InputError


def started_by_torchrun() -> bool:
    """Whether torchrun started this process, perhaps within a Slurm job."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def started_by_srun() -> bool:
    """Whether this process is a task of a Slurm step; a script given to `sbatch` is none, nor is a shell."""
    return "SLURM_STEP_NUM_TASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")


def launched_processes() -> tuple[int, int]:
    """Processes per node, and number of nodes, as torchrun or Slurm started them; (1, 1) without a launcher.

    Raises:
        InputError: Slurm started more processes on one node than on another.
    """
    environment = os.environ
    if started_by_torchrun():
        local = int(environment["LOCAL_WORLD_SIZE"])
        return local, int(environment["WORLD_SIZE"]) // local
    if started_by_srun():
        per_node, nodes = environment["SLURM_STEP_TASKS_PER_NODE"], int(environment["SLURM_STEP_NUM_NODES"])
        if "," in per_node:  # such as 2,1; as many on each of two nodes are 2(x2)
            raise InputError(
                f"Slurm started different numbers of processes on its {nodes} nodes ({per_node}); "
                "ask for the same on each with --ntasks-per-node"
            )
        return int(per_node.partition("(")[0]), nodes
    return 1, 1


def is_first_process() -> bool:
    """Whether this process prints for all that were started together."""
    rank = os.environ.get("SLURM_PROCID", "0") if started_by_srun() else "0"
    return os.environ.get("RANK", rank) == "0"

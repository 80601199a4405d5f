"""Dask workers in jobs of Slurm: what a job asks for, and the script that is submitted."""

import importlib
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from its2clr.errors import InputError
from its2clr.wording import did_you_mean

GPU = "GPU"
"""Resource of Dask workers that have a GPU, or a share of one: `dask worker --resources GPU=1`."""
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that say how many cores a worker uses."""


class SlurmJobs(BaseModel):
    """What each job of Slurm asks for."""

    model_config = ConfigDict(extra="forbid")

    partition: str | None = Field(None, description="partition; None: Slurm's own default")
    account: str | None = Field(None, description="who pays")
    time: str = Field("24:00:00", description="longest time of a job; work that is left goes on in the next one")
    memory: str = Field("32GB", description="memory of a job")
    cores: int = Field(8, ge=1, description="cores of a job")
    gpu: str = Field("1", description="GPU of a job, as in --gres=gpu:...: 1, a100:1; 0: none")
    workers: int = Field(1, ge=1, description="workers of a job, which share its cores, memory and GPU")
    interface: str | None = Field(None, description="network by which jobs reach this machine, e.g. ib0")
    directives: list[str] = Field([], description="further options of sbatch, e.g. --qos=low")
    prologue: list[str] = Field([], description="lines of shell before the workers start, e.g. module load cuda")
    folder: Path = Field(Path("slurm"), description="folder of logs and keys, which all nodes see")


def written_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Settings of Slurm's jobs by key, from `KEY=VALUE`; what is a list may be repeated.

    Raises:
        InputError: A text is something else.
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--slurm {text}: expected KEY=VALUE, e.g. partition=gpu")
        if key in {"directives", "prologue"}:
            found.setdefault(key, []).append(value)
        else:
            found[key] = value
    return found


def read_jobs(settings: Mapping[str, Any]) -> SlurmJobs:
    """Check the settings of Slurm's jobs.

    Raises:
        InputError: One is unknown or wrong.
    """
    try:
        return SlurmJobs.model_validate(dict(settings))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        hint = did_you_mean(name, SlurmJobs.model_fields, else_list=True) if name not in SlurmJobs.model_fields else ""
        raise InputError(f"--slurm {name}: {first['msg']}{hint}") from error


def jobqueue() -> Any:
    """The package dask_jobqueue. When it is imported it takes Ctrl-C for itself, which is undone."""
    heard = signal.getsignal(signal.SIGINT)
    try:
        return importlib.import_module("dask_jobqueue")
    finally:
        signal.signal(signal.SIGINT, heard)


def slurm_cluster(jobs: SlurmJobs, scheduler: Any, options: Mapping[str, Any]) -> Any:
    """Dask's cluster of such jobs, with a scheduler of this kind in this process; none of them is submitted yet."""
    from distributed import Security

    threads = max(1, jobs.cores // jobs.workers)
    has_gpu = jobs.gpu != "0"
    share = ["--resources", f"{GPU}={1 / jobs.workers:g}"] if has_gpu else []
    environment = {
        **dict.fromkeys(THREADS, threads),
        # Dask would have memory given back at once
        "MALLOC_TRIM_THRESHOLD_": 2**27,
        "MALLOC_MMAP_THRESHOLD_": 2**24,
        "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": False,
    }
    return jobqueue().SLURMCluster(
        job_name="its2clr",
        queue=jobs.partition,
        account=jobs.account,
        walltime=jobs.time,
        cores=jobs.workers,  # Dask's threads: one for each worker
        job_cpu=jobs.cores,
        memory=jobs.memory,
        processes=jobs.workers,
        interface=jobs.interface,
        job_extra_directives=["--no-requeue", *([f"--gres=gpu:{jobs.gpu}"] if has_gpu else []), *jobs.directives],
        job_script_prologue=[f"export {name}={value}" for name, value in environment.items()] + jobs.prologue,
        worker_extra_args=[*share, "--no-dashboard", "--memory-limit", "0"],  # Slurm sees to that
        log_directory=str(jobs.folder),
        shared_temp_directory=str(jobs.folder.absolute()),
        security=Security.temporary(),
        scheduler_cls=scheduler,
        scheduler_options=dict(options),
        silence_logs=False,
    )

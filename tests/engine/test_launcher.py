"""How processes find each other under torchrun and Slurm, from the variables that those set."""

import os
import socket

import pytest
import torch

from its2clr.config import EngineConfig
from its2clr.engine.devices import Engine, _process_environment
from its2clr.errors import InputError
from its2clr.launcher import is_first_process, launched_processes

STEP = {
    "SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "2", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_NODELIST": "gpu[01-09]",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[04,07]",
}  # fmt: skip
"""What `srun -n 4 -N 2` sets for its second task, in a step on two of nine nodes (Slurm 22.05)."""


def known_names(name, port):
    if name not in {"gpu04", "10.0.0.1"}:
        raise socket.gaierror(-2, "Name or service not known")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Without a launcher; what a test changes is undone."""
    keep = {
        key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "MASTER_", "TORCHELASTIC"))
    }
    monkeypatch.setattr(os, "environ", keep)
    monkeypatch.setattr(socket, "getaddrinfo", known_names)
    return keep


def test_tasks_of_a_step_find_each_other(environment):
    assert (launched_processes(), is_first_process()) == ((1, 1), True)
    environment |= STEP
    assert (launched_processes(), is_first_process()) == ((2, 2), False)
    fabric = _process_environment(2)
    assert (fabric.world_size(), fabric.global_rank(), fabric.local_rank(), fabric.node_rank()) == (4, 1, 1, 0)
    assert (fabric.main_address, fabric.main_port) == ("gpu04", 15_000 + 3456 + 202)
    fabric.validate_settings(2, 2)
    environment |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "999"}
    assert (_process_environment(2).main_address, _process_environment(2).main_port) == ("10.0.0.1", 999)


def test_torchrun_within_a_step_is_what_counts(environment):
    ranks = {"LOCAL_WORLD_SIZE": "3", "WORLD_SIZE": "6", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    environment |= STEP | ranks | {"TORCHELASTIC_RUN_ID": "x"}
    assert (launched_processes(), is_first_process()) == ((3, 2), True)
    assert _process_environment(3).world_size() == 6


@pytest.mark.parametrize("outside", ["a script of sbatch", "a shell of srun"])
def test_outside_a_step_there_is_one_process_that_waits_for_no_other(environment, outside):
    environment |= STEP
    if outside == "a shell of srun":
        environment["SLURM_JOB_NAME"] = "bash"
    else:
        for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_ID"):
            del environment[name]
    assert (launched_processes(), is_first_process()) == ((1, 1), True)
    assert Engine(EngineConfig(accelerator="cpu")).world_size == 1


def test_uneven_nodes_hidden_gpus_and_unknown_nodes_are_refused(environment, monkeypatch):
    environment |= STEP | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}
    with pytest.raises(InputError, match=r"2 nodes \(3,1\); .*--ntasks-per-node"):
        launched_processes()
    environment |= STEP
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="2 processes were started on this node, but this one sees 1 GPU"):
        Engine(EngineConfig(accelerator="auto"))
    environment |= {"SLURM_STEP_NODELIST": "gpu9"}
    environment.pop("MASTER_ADDR", None)
    with pytest.raises(InputError, match=r"gpu9, is not known by that name .*; set MASTER_ADDR"):
        _process_environment(2)

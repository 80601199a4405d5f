import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tests.end_to_end.commands import command, environment, its2clr, tiny_settings

from its2clr.engine.checkpoint import load_checkpoint


def metrics(run, stage):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [line for line in found if line["stage"] == stage]


def descendants(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [*map(int, children), *(pid for child in children for pid in descendants(child))]


def kill_in_refinement(started, run, after_epoch):
    """Start a fit and kill -9 it once refinement has finished an epoch."""
    process = subprocess.Popen(started, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while len(metrics(run, "refine")) < after_epoch:
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    for pid in [process.pid, *descendants(process.pid)]:  # torchrun's workers outlive a kill of torchrun
        os.kill(pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def in_two_processes(tiny_cohort, tmp_path_factory):
    """An uninterrupted run of two processes, and what they said."""
    run = tmp_path_factory.mktemp("whole") / "run"
    return run, its2clr("fit", tiny_cohort, "--out", run, *tiny_settings(), processes=2).stdout


@pytest.mark.slow
@pytest.mark.xdist_group("two processes")
def test_a_whole_fit_runs_in_two_processes(in_two_processes):
    run, said = in_two_processes
    results = json.loads((run / "results.json").read_text())
    assert 0 <= results["refined"]["test"]["bag_auc"] <= 1
    assert [line["epoch"] for line in metrics(run, "refine")] == [1, 2, 3, 4]  # one writer only
    assert said.count("results in") == 1


@pytest.mark.slow
@pytest.mark.xdist_group("two processes")
def test_a_killed_run_of_two_processes_resumed_equals_an_uninterrupted_one(tiny_cohort, in_two_processes, tmp_path):
    whole, _ = in_two_processes
    check_that_a_killed_run_goes_on(tiny_cohort, whole, tmp_path / "killed", processes=2)


@pytest.mark.slow
def test_a_killed_run_resumed_equals_an_uninterrupted_one(tiny_cohort, tmp_path):
    its2clr("fit", tiny_cohort, "--out", tmp_path / "whole", *tiny_settings())
    check_that_a_killed_run_goes_on(tiny_cohort, tmp_path / "whole", tmp_path / "killed", processes=1)


def check_that_a_killed_run_goes_on(tiny_cohort, whole, killed, processes):
    kill_in_refinement(command("fit", tiny_cohort, "--out", killed, *tiny_settings(), processes=processes), killed, 3)
    assert not (killed / "results.json").exists()
    result = its2clr("fit", tiny_cohort, "--out", killed, *tiny_settings(), processes=processes)
    assert "refine: continuing after epoch" in result.stdout

    one, other = (json.loads((run / "results.json").read_text()) for run in (whole, killed))
    assert one.pop("seconds").keys() == other.pop("seconds").keys()  # how long it took is not the same
    assert one == other
    for name in ("encoder-start", "encoder-refined"):
        tensors = [load_checkpoint(run / "checkpoints" / f"{name}.safetensors")[0] for run in (whole, killed)]
        assert all(np.array_equal(tensors[0][key], tensors[1][key]) for key in tensors[0])
    tables = [pd.read_parquet(run / "predictions.parquet") for run in (whole, killed)]
    pd.testing.assert_frame_equal(*tables)
    for stage in ("pretrain", "refine", "round"):
        assert [line["epoch"] for line in metrics(whole, stage)] == [line["epoch"] for line in metrics(killed, stage)]
    assert [line["loss"] for line in metrics(whole, "refine")] == [line["loss"] for line in metrics(killed, "refine")]

    again = its2clr("fit", "--out", killed)  # finished stages need no particular number of processes
    assert "pretrain: already done" in again.stdout
    assert "evaluate: already done" in again.stdout

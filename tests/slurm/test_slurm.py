"""The files of docs/guide/slurm.md on a real Slurm; `make slurm` runs them, pytest alone skips them."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from its2clr.engine.checkpoint import load_checkpoint
from tests.end_to_end.commands import ROOT, command, environment, its2clr, tiny_settings
from tests.end_to_end.test_resume import metrics
from tests.end_to_end.test_slides_killed import content, write_slides
from tests.slurm import cluster

REASON = cluster.missing() if os.environ.get("ITS2CLR_SLURM") == "1" else "takes minutes; ITS2CLR_SLURM=1 runs it"
pytestmark = [pytest.mark.skipif(REASON is not None, reason=REASON or ""), pytest.mark.xdist_group("slurm")]
PAGE = ROOT / "docs" / "guide" / "slurm.md"
SETTINGS = [*tiny_settings(), "--set", "engine.accelerator=cpu"]
TWO = "--ntasks-per-node=2"


@dataclass
class Slurm:
    """A running cluster, and the folder from which jobs are submitted."""

    folder: Path
    environment: dict[str, str]

    def ask(self, *command, timeout=300, quiet=False):
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        if not quiet:
            print("$", shlex.join(map(str, command)), done.stdout, done.stderr, sep="\n", flush=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(self, name, out, *options):
        """Submit a file of the page with a run of its own and tiny settings; the number of the job."""
        text = re.search(rf'```bash title="{name}"\n(.*?)```', PAGE.read_text(), re.DOTALL)[1]
        for said, meant in (("--recipe standard", shlex.join(SETTINGS)), ("runs/", f"{out}/")):
            assert said in text
            text = text.replace(said, meant)
        (self.folder / f"{out}.sbatch").write_text(text)
        return self.ask("sbatch", "--parsable", *options, f"{out}.sbatch")

    def state(self, job):
        said = self.ask("scontrol", "-o", "show", "job", job, quiet=True)
        return dict(part.split("=", 1) for part in said.split() if "=" in part)

    def wait(self, job, *states, seconds=300):
        deadline = time.monotonic() + seconds
        while (state := self.state(job))["JobState"] not in states:
            assert time.monotonic() < deadline, state
            time.sleep(0.5)
        words = [f"{name}={state[name]}" for name in ("JobState", "Reason", "Restarts", "ExitCode", "RunTime")]
        print(f"job {job}:", *words, flush=True)
        return state

    def finish(self, job):
        state = self.wait(job, "COMPLETED", "FAILED", "CANCELLED", "PREEMPTED")
        assert state["JobState"] == "COMPLETED", self.log(job)
        return state

    def log(self, job):
        log = Path(self.state(job)["StdOut"]).read_text()
        print(f"--- log of job {job}", log, sep="\n")
        return log

    def wait_for_epoch(self, run, epoch, seconds=200):
        deadline = time.monotonic() + seconds
        while len(metrics(run, "refine")) < epoch:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture(autouse=True)
def name_in_log(request):
    print(f"\n=== {request.node.name}", flush=True)


@pytest.fixture(scope="module")
def slurm(tiny_cohort, tmp_path_factory):
    folder = tmp_path_factory.mktemp("submitted")
    (folder / "cohorts").mkdir()
    (folder / "cohorts" / "mine").symlink_to(tiny_cohort)
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").write_text(f"export PATH={Path(sys.executable).parent}:$PATH\n")
    with cluster.cluster(tmp_path_factory.mktemp("slurm")) as reached:
        yield Slurm(folder, {**environment(), **{key: reached[key] for key in ("SLURM_CONF", "PATH")}})


@pytest.fixture(scope="module")
def with_torchrun(tiny_cohort, tmp_path_factory):
    """An undisturbed run of two processes without Slurm."""
    run = tmp_path_factory.mktemp("torchrun") / "run"
    its2clr("fit", tiny_cohort, "--out", run, *SETTINGS, processes=2)
    return run


def check_same(run, expected):
    """Results, encoders and losses are those of the other run, bit for bit."""
    results = [json.loads((one / "results.json").read_text()) for one in (run, expected)]
    for one in results:
        del one["seconds"]
    assert results[0] == results[1]
    for name in ("encoder-start", "encoder-refined"):
        tensors = [load_checkpoint(one / "checkpoints" / f"{name}.safetensors")[0] for one in (run, expected)]
        assert all(tensors[0][key].equal(tensors[1][key]) for key in tensors[1])
    losses = [[(line["epoch"], line["loss"]) for line in metrics(one, "refine")] for one in (run, expected)]
    assert losses[0] == losses[1]
    auc = results[0]["refined"]["test"]["bag_auc"]
    print(f"the same numbers as with torchrun: bag AUC {auc}, losses {losses[0]}")


def task_of(job, rank):
    """The process of a job that has this rank."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            its = process.environ()
            if (its.get("SLURM_JOB_ID"), its.get("SLURM_PROCID")) == (job, rank) and "fit" in process.cmdline():
                return process
    raise AssertionError(f"job {job} has no task {rank}")


@pytest.mark.parametrize("options", [(TWO,), ("--nodes=2", "--ntasks-per-node=1")])
def test_two_processes_give_the_numbers_of_torchrun(slurm, with_torchrun, options):
    out = f"fit-{len(options)}"
    job = slurm.submit("fit.sbatch", out, *options)
    slurm.finish(job)
    assert slurm.log(job).count("results in") == 1
    check_same(slurm.folder / out / "mine", with_torchrun)


def test_srun_alone_is_enough_and_an_error_is_said_once(slurm):
    done = subprocess.run(
        ["srun", "-n", "2", sys.executable, "-m", "its2clr", "fit", "nowhere", "--out", "none"],
        cwd=slurm.folder, env=slurm.environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("nowhere: does not exist") == 1, done.stderr
    words = "from its2clr.engine.devices import Engine; print('world', Engine().world_size)"
    assert slurm.ask("srun", "-n", "2", sys.executable, "-c", words).count("world 2") == 2
    script = f"#!/bin/bash\n{shlex.join([sys.executable, '-c', words])}\n"
    (slurm.folder / "alone.sh").write_text(script)
    slurm.ask("sbatch", "--wait", "-n", "2", "-o", "alone.log", "alone.sh", timeout=100)
    assert (slurm.folder / "alone.log").read_text() == "world 1\n"


@pytest.mark.parametrize("what", ["step", "task"])
def test_a_killed_job_submitted_again_goes_on(slurm, with_torchrun, what):
    run = slurm.folder / f"killed-{what}" / "mine"
    job = slurm.submit("fit.sbatch", run.parent.name, TWO)
    slurm.wait_for_epoch(run, 2)
    if what == "step":
        slurm.ask("scancel", "--signal=KILL", f"{job}.0")
    else:  # the others end too, rather than wait for ever
        task_of(job, "1").send_signal(signal.SIGKILL)
    state = slurm.wait(job, "FAILED", seconds=60)
    assert state["Restarts"] == "0"
    assert not (run / "results.json").exists()
    slurm.log(job)
    again = slurm.submit("fit.sbatch", run.parent.name, TWO)
    slurm.finish(again)
    assert "refine: continuing after epoch" in slurm.log(again)
    check_same(run, with_torchrun)


@pytest.mark.parametrize("partition", ["usual", "at-once"])
def test_a_preempted_job_comes_back_and_goes_on(slurm, with_torchrun, partition):
    run = slurm.folder / f"preempted-{partition}" / "mine"
    job = slurm.submit("fit.sbatch", run.parent.name, TWO, f"--partition={partition}", "--exclusive")
    slurm.wait_for_epoch(run, 2)
    before = time.monotonic()
    slurm.ask("srun", "--partition=urgent", "--nodes=2", "--exclusive", "true", timeout=60)
    seconds = time.monotonic() - before
    print(f"gave way after {seconds:.1f} s")
    assert seconds < cluster.GRACE_SECONDS  # before it was killed
    assert slurm.wait(job, "PENDING")["Restarts"] == "1"
    assert not (run / "results.json").exists()
    assert "stopped by SIGTERM; " in slurm.log(job)
    time.sleep(3)  # a node refuses a job that it has ended in the same second
    slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")  # rather than after two minutes
    slurm.finish(job)
    log = slurm.log(job)
    assert log.count("stopped by SIGTERM; ") == 1
    assert "refine: continuing after epoch" in log
    check_same(run, with_torchrun)


def test_an_array_trains_one_run_per_seed(slurm):
    array = slurm.submit("seeds.sbatch", "seeds", "--array=0-1")
    for seed in (0, 1):
        slurm.finish(f"{array}_{seed}")
    found = [json.loads((slurm.folder / "seeds" / f"seed-{seed}" / "results.json").read_text()) for seed in (0, 1)]
    assert found[0]["refined"] != found[1]["refined"]


JOBS = ["--slurm", "cores=1", "--slurm", "memory=4GB", "--slurm", "gpu=0", "--slurm", "time=01:00:00"]


def test_slides_are_cut_by_jobs_of_slurm(slurm, tmp_path):
    pytest.importorskip("dask_jobqueue")
    manifest = write_slides(tmp_path / "slides")
    cut = ["cohort", "slides", manifest, "--magnification", 20, "--tile-size", 32, "--workers", 2]
    its2clr(*cut[:3], tmp_path / "here", *cut[3:])
    on_slurm = command(*cut[:3], tmp_path / "there", *cut[3:], "--cluster", "slurm", *JOBS)
    assert "12 slides (12 tiled, 0 there)" in slurm.ask(*on_slurm)
    assert content(tmp_path / "there") == content(tmp_path / "here")


def test_reproduce_on_slurm_loses_jobs_but_no_run(slurm, tiny_cohort, tmp_path):
    """One job is cancelled and then all are preempted and started again by Slurm itself; the table is the same."""
    pytest.importorskip("dask_jobqueue")
    label, folder = "tab:aggregator_results", "tab-aggregator_results"
    paper = ["reproduce", label, "--budget", "smoke", "--cohort", tiny_cohort]
    place = ["--cluster", "slurm", "--workers", 2, *JOBS, "--slurm", "partition=at-once"]
    output = tmp_path / "output"

    def wait_for_runs(count):
        deadline = time.monotonic() + 300
        while f"[{count}/" not in output.read_text():
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.1)

    with output.open("w") as written:
        words = command(*paper, "--out", tmp_path / "there", *place, "--slurm", "directives=--exclusive")
        print("$", shlex.join(words), flush=True)
        process = subprocess.Popen(words, cwd=slurm.folder, env=slurm.environment, stdout=written, stderr=written)
        try:
            wait_for_runs(2)
            jobs = slurm.ask("squeue", "-h", "-n", "its2clr", "-t", "RUNNING", "-o", "%i").split()
            slurm.ask("scancel", jobs[0])
            wait_for_runs(4)
            slurm.ask("srun", "--partition=urgent", "--nodes=2", "--exclusive", "true", timeout=100)
            assert process.wait(timeout=600) == 0, output.read_text()
        finally:
            process.kill()
    print(output.read_text())
    assert "FAILED" not in output.read_text()
    assert slurm.ask("squeue", "-h", "-n", "its2clr", "-t", "PENDING,RUNNING") == ""
    its2clr(*paper, "--out", tmp_path / "here", "--workers", 1, timeout=900)
    here, there = (losses_of_runs(tmp_path / where) for where in ("here", "there"))
    assert len(here) == 8
    assert there == here
    tables = [(tmp_path / where / folder / "table.csv").read_text() for where in ("here", "there")]
    assert tables[0] == tables[1]
    print(f"the same table, and the same losses in {len(here)} runs")


def losses_of_runs(folder):
    """What each run of a reproduction learned, by its folder."""
    runs = sorted(path.parent for path in (folder / "runs").rglob("metrics.jsonl"))
    stages = ("pretrain", "refine")
    return {
        run.relative_to(folder): [(line["epoch"], line["loss"]) for stage in stages for line in metrics(run, stage)]
        for run in runs
    }

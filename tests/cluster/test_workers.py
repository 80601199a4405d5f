"""Dask workers of this machine and of a (pretended) Slurm: who dies, who may ask, and what is submitted."""

import http.client
import json
import os
import signal
import socket
import ssl
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
from distributed import Scheduler

from its2clr.cluster.place import Cluster
from its2clr.cluster.slurm import SlurmJobs, jobqueue, read_jobs, slurm_cluster, written_settings
from its2clr.cluster.workers import WorkersDied, workers_of
from its2clr.errors import InputError
from tests.cohort.work_for_others import always_die, dask_worker, die_once, fail
from tests.end_to_end.commands import environment

pytestmark = pytest.mark.xdist_group("cluster")
SCRIPTS = Path(__file__).parent / "slurm_that_is_none"


@pytest.fixture(scope="module")
def said():
    return []


@pytest.fixture(scope="module")
def local(said):
    with workers_of(Cluster(workers=2), say=said.append) as workers:
        yield workers


def do(workers, function, *items, **options):
    pieces = iter([(item, item) for item in items])
    return dict(workers.work(function, lambda: next(pieces, None), **options))


def test_a_piece_is_tried_again_and_a_deadly_one_given_up(local, tmp_path):
    place = str(tmp_path / "a")
    found = do(local, die_once, place)
    assert found == {place: "second try"}
    found = do(local, always_die, "x", "bad", "y")
    assert isinstance(found.pop("bad"), WorkersDied)
    assert found == {"x": "x", "y": "y"}


def test_an_error_ends_the_work_and_the_workers_do_the_next(local):
    with pytest.raises(OSError, match="the disk is full"):
        do(local, fail, "plain")
    assert do(local, always_die, "x") == {"x": "x"}


def test_a_spoiled_process_does_no_more_and_looks_are_regular(local, monkeypatch, tmp_path):
    monkeypatch.setattr("its2clr.cluster.workers.LOOK_EVERY_SECONDS", 0.05)
    looks = []
    notes = [str(tmp_path / name) for name in "abc"]
    found = do(local, dask_worker, *notes, spoils=lambda _: True, look=lambda: looks.append(1))
    assert len({process for process, *_ in found.values()}) == 3
    for _, threads, deaf_to, _ in found.values():
        assert threads == str(max(1, os.cpu_count() // 2))
        assert {signal.SIGINT, signal.SIGTERM} <= deaf_to
    assert len(looks) > 3
    assert [Path(note).read_text() for note in notes] == ["done "] * 3  # and nothing is done again


def test_nobody_else_can_give_work_or_look(local, tmp_path):
    """Every port of this run wants its keys, or has no page for who was not told where its pages are."""
    process = psutil.Process()
    ports = {tuple(one.laddr) for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN}
    for *_, of_worker in do(local, dask_worker, *(str(tmp_path / name) for name in "ab")).values():
        ports |= set(of_worker)
    answers = {place: answer_to_a_stranger(place) for place in ports}
    assert sorted(answers.values()) == ["closed"] * 5 + ["no such page"] * 3  # scheduler, two workers, their nannies
    assert {host for host, _ in ports} == {"127.0.0.1"}


def answer_to_a_stranger(place):
    connection = http.client.HTTPConnection(*place, timeout=5)
    try:
        for page in ("/", "/status", "/info/main/workers.html", "/metrics", "/json/counts.json", "/sitemap.json"):
            connection.request("GET", page)
            answer = connection.getresponse()
            assert answer.status == 404 or json.load(answer) == {"paths": ["/sitemap.json"]}
            answer.read()
    except (OSError, http.client.HTTPException):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with socket.create_connection(place, timeout=5) as plain, pytest.raises(ssl.SSLError, match="required"):
            context.wrap_socket(plain).recv(1)
        return "closed"
    else:
        return "no such page"
    finally:
        connection.close()


def test_the_dashboard_is_where_it_is_said_to_be(local, said):
    pytest.importorskip("bokeh")
    page = urllib.request.urlopen(said[0].removeprefix("dashboard: "), timeout=20).read()
    assert b"Dask" in page


def test_the_package_for_slurm_leaves_ctrl_c_alone(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "dask_jobqueue"]:
        monkeypatch.delitem(sys.modules, name)
    heard = signal.getsignal(signal.SIGINT)
    assert jobqueue().SLURMCluster
    assert signal.getsignal(signal.SIGINT) is heard


def test_what_a_job_of_slurm_asks_for(tmp_path):
    asked = ["partition=gpu", "time=4:00:00", "memory=64GB", "cores=16", "gpu=a100:1", "workers=2", "interface=lo"]
    asked += ["directives=--qos=low", "directives=--nice", "prologue=module load cuda", f"folder={tmp_path}"]
    jobs = read_jobs(written_settings(asked))
    cluster = slurm_cluster(jobs, Scheduler, {"dashboard_address": "127.0.0.1:0"})
    try:
        script = cluster.job_script()
    finally:
        cluster.close()
    lines = script.splitlines()
    for line in ("-p gpu", "-t 4:00:00", "--mem=60G", "--cpus-per-task=16", "--gres=gpu:a100:1", "--qos=low", "--nice"):
        assert f"#SBATCH {line}" in lines
    assert "export OMP_NUM_THREADS=8" in lines
    assert lines.index("module load cuda") < len(lines) - 1
    command = lines[-1]
    assert command.startswith(f"{sys.executable} -m distributed.cli.dask_worker tls://127.0.0.1:")
    for words in ("--nworkers 2", "--nthreads 1", "--resources GPU=0.5", "--memory-limit 0", "--tls-key"):
        assert words in command
    assert "PRIVATE KEY" not in script


def test_a_job_without_a_gpu(tmp_path):
    cluster = slurm_cluster(
        SlurmJobs(gpu="0", interface="lo", folder=tmp_path), Scheduler, {"dashboard_address": "127.0.0.1:0"}
    )
    try:
        script = cluster.job_script()
    finally:
        cluster.close()
    assert "gres" not in script
    assert "--resources" not in script


def test_mistakes_are_said():
    with pytest.raises(InputError, match=r"--slurm partitoin: .*did you mean 'partition'"):
        read_jobs({"partitoin": "gpu"})
    with pytest.raises(InputError, match=r"--slurm cores: .*greater than or equal to 1"):
        read_jobs({"cores": 0})
    with pytest.raises(InputError, match="expected KEY=VALUE"):
        written_settings(["gpu"])
    with pytest.raises(InputError, match="at least 1"):
        Cluster(workers=0)
    with pytest.raises(InputError, match="started there"):
        Cluster("tcp://node:8786", workers=2)
    with pytest.raises(InputError, match="need --cluster slurm"):
        Cluster(slurm={"cores": 1})


@pytest.mark.skipif(sys.platform != "linux", reason="the pretended Slurm wants setsid")
def test_jobs_of_slurm_that_end_are_submitted_anew(tmp_path, monkeypatch):
    """A job that is killed over a piece of work: the next job does it. At the end no job is left."""
    import dask

    monkeypatch.setenv("PATH", str(SCRIPTS), prepend=os.pathsep)
    monkeypatch.setenv("JOBS", str(tmp_path / "jobs"))
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.chdir(tmp_path)
    jobs = {"gpu": "0", "cores": 1, "memory": "2GB", "interface": "lo", "folder": str(tmp_path / "slurm")}
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "0.2s"}),
        workers_of(Cluster("slurm", 1, jobs)) as workers,
    ):
        place = str(tmp_path / "a")
        found = do(workers, kill_job_once, place, trains=False)
        assert found == {place: "second try"}
    started = (tmp_path / "jobs").read_text().split()
    assert len(started) == 2
    left = [psutil.Process(int(job)) for job in started if psutil.pid_exists(int(job))]
    assert not [job for job in left if job.status() != psutil.STATUS_ZOMBIE and job.wait(20)]
    logs = list((tmp_path / "slurm").glob("*.err"))
    assert len(logs) == 2


def kill_job_once(place):
    """Kill the whole job that this runs in, as Slurm does."""
    if Path(place).exists():
        return "second try"
    Path(place).touch()
    os.killpg(os.getpgid(0), signal.SIGKILL)
    return None


def test_slurm_is_needed_for_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="no `sbatch` here"), workers_of(Cluster("slurm")):
        pass
    assert not (tmp_path / "slurm").exists()

"""A Slurm cluster of two nodes on this machine, for as long as a command runs: `python -m tests.slurm.cluster COMMAND`.

Both nodes are this machine, under two names. They say that they have more processors than there are, and four GPUs
that are empty files, so that the files of docs/guide/slurm.md can be submitted as they stand.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
GRACE_SECONDS = 40
"""From SIGTERM to SIGKILL, when a job has to give way."""
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
KillWait={grace}
MinJobAge=3600
SchedulerParameters=sched_interval=2,sched_min_interval=0,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=64 RealMemory=512000 Gres=gpu:4
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=64 RealMemory=512000 Gres=gpu:4
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace}
PartitionName=at-once Nodes=ALL PriorityTier=1 GraceTime=0
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


def missing() -> str | None:
    """What keeps a cluster from being started here; None if nothing does."""
    if absent := [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]:
        return f"no {', '.join(absent)} here (Debian: apt-get install slurm-wlm munge)"
    return None if os.geteuid() == 0 else "Slurm's daemons start as root only"


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start munge, the controller and both nodes in an empty folder; stop them at the end.

    Yields:
        Environment in which `sbatch`, `srun` and the others reach this cluster.
    """
    host = socket.gethostname().partition(".")[0]
    nodes = [host, "localhost"]  # names by which processes find each other
    for name in ("munge", "state", *(f"spool-{node}" for node in nodes)):
        (folder / name).mkdir(mode=0o700)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    for number in range(4):
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-3]\n")
    config = CONFIG.format(host=host, folder=folder, nodes=nodes, ports=_free_ports(3), grace=GRACE_SECONDS)
    (folder / "slurm.conf").write_text(config)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
    of_munge = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munge = ["munged", "--foreground", "--force", *(f"--{key}={folder}/munge/{of_munge[key]}" for key in of_munge)]
    with ExitStack() as daemons:
        for name, command in {
            "munged": munge,
            "slurmctld": ["slurmctld", "-D", "-c"],
            **{f"slurmd-{node}": ["slurmd", "-D", "-N", node] for node in nodes},
        }.items():
            daemons.enter_context(_daemon(command, environment, folder / f"{name}.out"))
            if name == "munged":
                _wait((folder / "munge" / "socket").exists, "munged listens", folder)
        _wait(lambda: _ask("sinfo", "-h", "-o", "%T %D", "-p", "usual", at=environment) == "idle 2", "idle", folder)
        try:
            yield environment
        finally:
            _ask("scancel", "--user", "root", at=environment)
            _wait(lambda: not _ask("squeue", "-h", at=environment), "jobs end", folder)


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def _daemon(command: list[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ask(*command: str, at: dict[str, str]) -> str:
    return subprocess.run(command, env=at, capture_output=True, text=True, check=False, timeout=60).stdout.strip()


def _wait(is_so: Callable[[], bool], what: str, folder: Path, seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            said = "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in sorted(folder.glob("*.out")))
            raise TimeoutError(f"not so after {seconds} s: {what}\n{said}")
        time.sleep(0.2)


if __name__ == "__main__":
    if (reason := missing()) is not None:
        sys.exit(f"no cluster: {reason}")
    with tempfile.TemporaryDirectory() as temporary, cluster(Path(temporary)) as environment:
        code = subprocess.run(sys.argv[1:] or ["bash"], env=environment, check=False).returncode
    sys.exit(code)

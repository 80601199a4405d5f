"""Work on Dask workers: processes of this machine, jobs of Slurm, or what a scheduler somewhere has.

A piece of work whose worker dies is given to another worker. After several deaths it is given up, and the others go on.
"""

import logging
import os
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from multiprocessing import resource_tracker
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from its2clr.cluster.place import LOCAL, SLURM, Cluster
from its2clr.cluster.slurm import GPU, THREADS, SlurmJobs, jobqueue, read_jobs, slurm_cluster
from its2clr.errors import InputError, extra_needed
from its2clr.memory_limit import take_blas_memory
from its2clr.processes import without_script
from its2clr.signals import interrupts_wait
from its2clr.version import __version__

LOOK_EVERY_SECONDS = 1.0
_CONNECT_SECONDS = 30
_WORKERS_SECONDS = 120
_HOME = "127.0.0.1"
_SETTINGS: dict[str, Any] = {
    "distributed.scheduler.worker-ttl": None,  # training may be deaf for long; a worker that is gone hangs up
    "distributed.worker.profile.enabled": False,
    "distributed.worker.http.routes": [],
    # Dask would give one thread to BLAS, and have memory given back at once
    "distributed.nanny.pre-spawn-environ": {"DASK_LOGGING__DISTRIBUTED": "critical"},
}
_IN_SLURM = {"distributed.scheduler.allowed-failures": 10}
"""Jobs of Slurm are preempted, and end with their time; that is not the fault of the work."""
_WELL, _SPOILED, _REFUSED = "well", "spoiled", "refused"
_alone = threading.Lock()
_spoiled = threading.Event()

_Key = TypeVar("_Key")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class WorkersDied(Exception):  # noqa: N818 - an outcome, not an error of the program
    """Every worker that was given this piece died."""

    def __init__(self) -> None:
        super().__init__("its worker died each time it was tried")


class Workers:
    """The workers of a Dask scheduler.

    Args:
        client: Dask's client.
        keep: Called now and then, to start workers anew that are lost.
    """

    def __init__(self, client: Any, keep: Callable[[], None] = lambda: None) -> None:
        self._client, self._keep = client, keep

    def work(
        self,
        function: Callable[[_Item], _Result],
        next_piece: Callable[[], tuple[_Key, _Item] | None],
        *,
        trains: bool = True,
        look: Callable[[], None] = lambda: None,
        spoils: Callable[[_Result], bool] = lambda _: False,
    ) -> Iterator[tuple[_Key, _Result | WorkersDied]]:
        """Apply a function to pieces of work, as many at a time as there is room, and yield results as they come.

        Args:
            function: What to do; an error it raises ends the work and is raised here.
            next_piece: Gives the key and the item that are to be done next; None if nothing can be done now. The work
                is over when nothing can be done and nothing is being done.
            trains: Whether a piece is a training: it wants a worker for itself, with a GPU if any has one.
            look: Called every second.
            spoils: Tells by a result whether its worker's process should do no more; another one takes its place.

        Yields:
            The key and the result; `WorkersDied` for a piece that was given up.
        """
        from distributed import wait

        running: dict[Any, tuple[_Key, _Item]] = {}
        refused: list[tuple[_Key, _Item]] = []
        do = partial(_do, function, spoils, Path.cwd(), __version__, trains)
        try:
            while True:
                room, resources = self._room(trains)
                while len(running) < room and (piece := refused.pop() if refused else next_piece()) is not None:
                    running[self._client.submit(do, piece[1], pure=False, resources=resources)] = piece
                if not running:
                    return
                try:
                    done = wait(list(running), timeout=LOOK_EVERY_SECONDS, return_when="FIRST_COMPLETED").done
                except TimeoutError:
                    done = set()
                found = [(running.pop(future), *_answer(future)) for future in done]
                if spoiled := [address for _, address, fate, _ in found if fate == _SPOILED]:
                    self._let_go(done)
                    self._client.restart_workers(spoiled, raise_for_error=False)
                for piece, _, fate, result in found:
                    if fate == _REFUSED:
                        refused.append(piece)
                    else:
                        yield piece[0], result
                del done  # frees the results on the workers
                self._keep()
                look()
        except CancelledError as error:
            raise InputError("the Dask scheduler was lost; the same command goes on where it stopped") from error
        finally:
            self._client.cancel(list(running))

    def _let_go(self, futures: Iterable[Any]) -> None:
        """Have Dask forget these pieces: a result that is wanted is made again if its worker ends."""
        keys = []
        for future in futures:
            keys.append(future.key)
            future.release()
        while keys and self._client.run_on_scheduler(lambda dask_scheduler: any(map(dask_scheduler.tasks.get, keys))):
            time.sleep(0.01)

    def _room(self, trains: bool) -> tuple[int, dict[str, float]]:
        """How many pieces are given out at once, and what they ask of a worker.

        There is room for one also in the moment when every worker is being started anew.
        """
        workers = list(self._client.scheduler_info(n_workers=-1)["workers"].values())
        if not trains:
            return max(1, sum(worker["nthreads"] for worker in workers)), {}
        shares = [share for worker in workers if (share := worker.get("resources", {}).get(GPU))]
        return max(1, len(shares) or len(workers)), {GPU: min(shares)} if shares else {}


def _answer(future: Any) -> tuple[str | None, str, Any]:
    """The worker of a piece that is done, how it is, and the result."""
    from distributed import KilledWorker

    error = future.exception() if future.status != "finished" else None
    if isinstance(error, KilledWorker):
        return None, _WELL, WorkersDied()
    if error is not None:
        raise error
    answer: tuple[str, str, Any] = future.result()
    return answer


def _do(
    function: Callable[[_Item], _Result],
    spoils: Callable[[_Result], bool],
    folder: Path,
    version: str,
    trains: bool,
    item: _Item,
) -> tuple[str, str, _Result | None]:
    """Do a piece of work, in a worker; its address and how it is afterwards are given back with the result.

    Dask may have given it the next piece before anybody heard that its process is spoiled: that piece it refuses.
    """
    from distributed import get_worker

    worker = get_worker()
    if version != __version__:
        raise InputError(f"the Dask worker at {worker.address} has its2clr {__version__}, this command has {version}")
    with _alone if trains else nullcontext():
        if _spoiled.is_set():
            return worker.address, _REFUSED, None
        try:
            os.chdir(folder)  # paths may be relative
        except OSError as error:
            raise InputError(f"{folder} is not there on the Dask worker at {worker.address}") from error
        take_blas_memory()
        result = function(item)
        if worker.nanny is not None and spoils(result):  # which starts another process
            _spoiled.set()
        return worker.address, _SPOILED if _spoiled.is_set() else _WELL, result


@contextmanager
def workers_of(
    cluster: Cluster, most: int | None = None, say: Callable[[str], None] = lambda _: None
) -> Iterator[Workers]:
    """Start workers, or find those of a scheduler; what was started ends with the block.

    Args:
        cluster: Where.
        most: Do not start more than this many.
        say: Takes a line for the person who waits.

    Raises:
        InputError: A package is missing, no scheduler answers, or it has no workers.
    """
    with extra_needed(f"--cluster {cluster.where}" if not cluster.is_local else "more than one worker", "cluster"):
        import dask
        import distributed  # noqa: F401

        if cluster.where in {LOCAL, SLURM}:
            import cryptography  # noqa: F401
        if cluster.where == SLURM:
            jobqueue()
    for name in ("distributed", "distributed.client"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what it says is for those who know Dask
    count = min(cluster.workers or 1, most or 10**9)
    with dask.config.set(_SETTINGS):
        if cluster.is_local:
            with _on_this_machine(count, say) as workers:
                yield workers
        elif cluster.where == SLURM:
            with dask.config.set(_IN_SLURM), _in_slurm(read_jobs(cluster.slurm), count, say) as workers:
                yield workers
        else:
            with _at(cluster.where) as workers:
                yield workers


@contextmanager
def _on_this_machine(count: int, say: Callable[[str], None]) -> Iterator[Workers]:
    """Processes of this machine, which share its cores and GPUs; only who has the keys of this run can reach them."""
    import torch
    from distributed import Client, Nanny, Security, SpecCluster

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    share = 1 / -(-count // len(gpus)) if gpus else 0
    threads = {name: str(max(1, (os.cpu_count() or 1) // count)) for name in THREADS}
    keys = Security.temporary()
    with TemporaryDirectory(prefix="its2clr-workers-") as folder, ExitStack() as stack:
        of_all = {"nthreads": 1, "host": _HOME, "protocol": "tls", "security": keys, "memory_limit": 0}
        workers = {
            number: {
                "cls": Nanny,
                "options": {
                    **of_all,
                    "local_directory": folder,
                    "env": {**threads, **({"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {})},
                    "resources": {GPU: share} if gpus else {},
                },
            }
            for number in range(count)
        }
        kind, options = _scheduler()
        scheduler = {"cls": kind, "options": {"host": _HOME, "protocol": "tls", "security": keys, **options}}
        resource_tracker.ensure_running()  # it would let signals through to the first worker
        # workers, whenever they are started, stay deaf to what this process hears
        with interrupts_wait(), without_script():
            of_dask = SpecCluster(workers, scheduler, security=keys, silence_logs=False)
            client = stack.enter_context(Client(of_dask))
            stack.callback(_end, of_dask, client)
        _say_dashboard(of_dask, say)
        yield Workers(client)


def _end(of_dask: Any, client: Any) -> None:
    """Kill the workers at once: what they do can be gone on with, and a person who stops a command waits."""
    with interrupts_wait():
        for nanny in of_dask.workers.values():
            nanny.close_gracefully()  # it starts no other
            if nanny.pid is not None:
                os.kill(nanny.pid, signal.SIGKILL)
        client.close()
        of_dask.close()


@contextmanager
def _in_slurm(jobs: SlurmJobs, count: int, say: Callable[[str], None]) -> Iterator[Workers]:
    """Jobs of Slurm; one that ends before the work does is submitted anew."""
    from distributed import Client

    if shutil.which("sbatch") is None:
        raise InputError("--cluster slurm: no `sbatch` here; run this on a machine from which jobs are submitted")
    jobs.folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        resource_tracker.ensure_running()
        with interrupts_wait():
            of_dask = slurm_cluster(jobs, *_scheduler())
            client = stack.enter_context(Client(of_dask))
            stack.callback(_close, of_dask, client)
        keep = partial(of_dask.scale, count)
        keep()
        say(f"slurm: {-(-count // jobs.workers)} jobs submitted, logs in {jobs.folder}; work begins with the first job")
        _say_dashboard(of_dask, say)
        yield Workers(client, keep=keep)


def _close(of_dask: Any, client: Any) -> None:
    with interrupts_wait():
        client.close()
        of_dask.close()


@contextmanager
def _at(scheduler: str) -> Iterator[Workers]:
    from distributed import Client

    try:
        client = Client(scheduler, timeout=_CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise InputError(f"no Dask scheduler answers at {scheduler} ({error})") from error
    with client:
        try:
            client.wait_for_workers(1, timeout=_WORKERS_SECONDS)
        except TimeoutError as error:
            raise InputError(f"the Dask scheduler at {scheduler} has no workers; start some") from error
        yield Workers(client)


def _scheduler() -> tuple[Any, dict[str, Any]]:
    """A kind of scheduler whose web pages only those find who are told where they are, and options of it."""
    from distributed import Scheduler

    prefix = f"/{secrets.token_urlsafe(16)}"

    class Discreet(Scheduler):  # type: ignore[misc, no-any-unimported, unused-ignore]
        def start_http_server(self, *arguments: Any, **options: Any) -> None:
            super().start_http_server(*arguments, **options)
            find = self.http_application.find_handler

            def find_handler(request: Any, **more: Any) -> Any:
                if not request.path.startswith(f"{prefix}/"):
                    request.path = "/nothing"  # Dask would lead from / to the right place
                return find(request, **more)

            self.http_application.find_handler = find_handler

    return Discreet, {"http_prefix": prefix, "dashboard": _has_dashboard(), "dashboard_address": f"{_HOME}:0"}


def _say_dashboard(of_dask: Any, say: Callable[[str], None]) -> None:
    if _has_dashboard():
        prefix = of_dask.scheduler_spec["options"]["http_prefix"]
        say(f"dashboard: http://{_HOME}:{of_dask.scheduler.http_server.port}{prefix}/status")


def _has_dashboard() -> bool:
    return find_spec("bokeh") is not None

"""What tests give to worker processes; in a file of its own, since those import it."""

import os
import signal
import time
from pathlib import Path

import psutil


def die_once(place):
    """Kill the worker the first time; give back which try this is."""
    marker = Path(place)
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "second try"


def always_die(place):
    if place == "bad":
        os.kill(os.getpid(), signal.SIGKILL)
    return place


def where_it_runs(_):
    return os.getpid(), os.environ["OPENBLAS_NUM_THREADS"], signal.getsignal(signal.SIGINT)


def dask_worker(note):
    """Its process, how many threads it uses, what it is deaf to, and the ports on which it listens."""
    with Path(note).open("a") as file:
        file.write("done ")
    time.sleep(0.3)  # so that another worker takes the next one
    connections = psutil.Process().net_connections("inet")
    ports = [tuple(one.laddr) for one in connections if one.status == psutil.CONN_LISTEN]
    return os.getpid(), os.environ["OMP_NUM_THREADS"], signal.pthread_sigmask(signal.SIG_BLOCK, ()), ports


class NotToBeSentError(Exception):
    def __init__(self, said):
        super().__init__(said)
        self.of_this_process = (number for number in [1])


def fail(how):
    if how == "plain":
        raise OSError("the disk is full")
    raise NotToBeSentError("something else")

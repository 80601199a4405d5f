"""What tests give to worker processes; in a file of its own, since those import it."""

import os
import signal
from pathlib import Path


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


class NotToBeSentError(Exception):
    def __init__(self, said):
        super().__init__(said)
        self.of_this_process = (number for number in [1])


def fail(how):
    if how == "plain":
        raise OSError("the disk is full")
    raise NotToBeSentError("something else")

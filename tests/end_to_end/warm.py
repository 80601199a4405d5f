"""Commands in processes that have imported torch already: importing it takes longer than most commands of a test.

A server imports the libraries once. For each command it forks a process, which runs `python -m its2clr` in full and has
its own environment, output and end.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path

LIBRARIES = (
    "its2clr.cli",
    "its2clr.cohort.slides",
    "its2clr.experiments.reproduce",
    "its2clr.predict.new_bags",
    "its2clr.report",
    "its2clr.run.evaluation",
    "its2clr.run.opening",
)


def run(arguments, environment, folder, timeout):
    """Run `its2clr ARGUMENTS`; what it says goes through files in a folder."""
    places = [folder / name for name in ("stdout", "stderr")]
    server = _server()
    asked = [arguments, environment, str(Path.cwd()), [str(place) for place in places], timeout]
    server.stdin.write(json.dumps(asked) + "\n")
    server.stdin.flush()
    code = int(server.stdout.readline())
    return subprocess.CompletedProcess(["its2clr", *arguments], code, *(place.read_text() for place in places))


@cache
def _server():
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root)])
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.end_to_end.warm"],
        env={**os.environ, "PYTHONPATH": paths}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    atexit.register(server.communicate)  # it ends when nothing more can be asked
    return server


def _serve():
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.freeze()  # a collection would touch, and so copy, all the memory that a fork shares
    for line in sys.stdin:
        arguments, environment, directory, places, timeout = json.loads(line)
        child = os.fork()
        if child == 0:
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(directory)
            for number, place in zip((0, 1, 2), (os.devnull, *places), strict=True):
                os.dup2(os.open(place, os.O_RDWR | os.O_CREAT, 0o600), number)
            signal.alarm(timeout)
            _end(_main(arguments))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201
    _end(0)


def _main(arguments):
    """What `python -m its2clr` does, and its exit code."""
    sys.argv[1:] = arguments
    try:
        runpy.run_module("its2clr", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code or 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        return 1
    return 0


def _end(code):
    """End as a process does, but for the freeing of all the modules, which takes a second."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()

"""Start the command line as a user does, in a process of its own."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conftest import TINY
from tests.end_to_end import warm

ROOT = Path(__file__).parents[2]


def environment():
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])  # this checkout's, whatever is installed
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "TERM": "dumb", "COLUMNS": "120"}


def command(*arguments, processes=1):
    """The words of `its2clr ARGUMENTS`, under torchrun when there are several processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return [sys.executable, *(launcher if processes > 1 else []), "-m", "its2clr", *map(str, arguments)]


def its2clr(*arguments, check=True, timeout=400, processes=1, fresh=False):
    """Run `its2clr ARGUMENTS`; the result holds output and exit code.

    A fresh process imports everything itself, as a user's does; others come from one that has (`warm`).
    """
    words = command(*arguments, processes=processes)
    if fresh or processes > 1 or sys.platform != "linux":  # elsewhere a fork of a process with libraries may not live
        result = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False, timeout=timeout)
    else:
        with tempfile.TemporaryDirectory() as folder:
            result = warm.run(words[3:], environment(), Path(folder), timeout)
    if check and result.returncode:
        raise AssertionError(f"{words} exited {result.returncode}:\n{result.stdout}\n{result.stderr}")
    return result


def tiny_settings():
    return ["--recipe", "demo", *(part for override in TINY for part in ("--set", override))]

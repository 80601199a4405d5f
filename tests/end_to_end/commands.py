"""Start the command line as a user does, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import TINY

ROOT = Path(__file__).parents[2]


def environment():
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])  # this checkout's, whatever is installed
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "TERM": "dumb", "COLUMNS": "120"}


def command(*arguments, processes=1):
    """The words of `its2clr ARGUMENTS`, under torchrun when there are several processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return [sys.executable, *(launcher if processes > 1 else []), "-m", "its2clr", *map(str, arguments)]


def its2clr(*arguments, check=True, timeout=400, processes=1):
    """Run `its2clr ARGUMENTS`; the result holds output and exit code."""
    words = command(*arguments, processes=processes)
    result = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False, timeout=timeout)
    if check and result.returncode:
        raise AssertionError(f"{words} exited {result.returncode}:\n{result.stdout}\n{result.stderr}")
    return result


def tiny_settings():
    return ["--recipe", "demo", *(part for override in TINY for part in ("--set", override))]

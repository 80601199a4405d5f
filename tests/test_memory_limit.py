"""Little address space (`ulimit -v`): linear algebra never waits for memory without end."""

import subprocess
import sys

import pytest

from its2clr.memory_limit import is_out_of_memory, limited_memory, said_out_of_memory
from tests.end_to_end.commands import command, environment

FULL = """
import mmap, resource, signal, sys
import numpy as np
from scipy.linalg import lapack
from its2clr.memory_limit import take_blas_memory
signal.alarm(20)  # the default action, since a library that spins hears nothing else
now = int(open("/proc/self/statm").read().split()[0]) * mmap.PAGESIZE
resource.setrlimit(resource.RLIMIT_AS, (now + int(sys.argv[1]) * 2**20,) * 2)
take_blas_memory()
held = []
try:
    while True:
        held.append(mmap.mmap(-1, 2**20))
except OSError:
    del held[:16]  # room for the small arrays below, too little for a buffer of OpenBLAS, which takes 32 MiB
lapack.dpotrf(np.eye(8))
small = np.ones((200, 20)) @ np.ones((20, 200))
print("done")
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit address space so")


def with_room(mebibytes):
    words = [sys.executable, "-c", FULL, str(mebibytes)]
    return subprocess.run(words, env=environment(), capture_output=True, text=True, check=False, timeout=60)


def test_linear_algebra_works_on_when_all_address_space_is_taken():
    """Fails, killed by its alarm, if `take_blas_memory` does nothing: OpenBLAS then asks for memory for ever."""
    result = with_room(400)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


def test_too_little_room_for_linear_algebra_is_one_error():
    result = with_room(60)
    assert "InputError: out of memory: this process may have" in result.stderr


@pytest.mark.parametrize("kib", [300_000, 1_000_000])
def test_a_command_with_little_address_space_is_one_line(kib, tmp_path):
    words = ["bash", "-c", f'ulimit -v {kib} && exec "$@"', "-", *command("evaluate", tmp_path)]
    result = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "(ulimit -v); allow more" in result.stderr


def test_which_errors_speak_of_memory():
    said = ("libtorch_cuda.so: failed to map segment from shared object", "can't start new thread", "std::bad_alloc")
    assert all(is_out_of_memory(ImportError(text)) for text in said)
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
    assert limited_memory() is not None or "Lower pretrain.batch_size" in said_out_of_memory(MemoryError())

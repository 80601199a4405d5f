"""One GPU for several processes at once, by CUDA's multi-process service (MPS)."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

PROGRAM = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
USUAL_PIPES = Path("/tmp/nvidia-mps")  # noqa: S108 (NVIDIA's own place)
SECONDS = 30
PROBE = """
import ctypes, sys
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
sys.exit(int(cuda.cuInit(0) != 0 or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) != 0))
"""
"""Whether a process gets a GPU; it says so by its exit code."""


@contextmanager
def shared_gpu() -> Iterator[None]:
    """Processes that are started in the block use a GPU at the same time instead of taking turns.

    Taking turns is what makes many workers slow: small kernels of a dozen processes wait for each other. The service is
    this process's own and ends with the block. If one is running already, that one is used; where none can be had,
    nothing changes.
    """
    if PIPES in os.environ or (USUAL_PIPES / "control").exists() or shutil.which(PROGRAM) is None:
        yield
        return
    with TemporaryDirectory(prefix="its2clr-mps-") as folder:
        own = {PIPES: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        # It has all GPUs, or its numbers of them would differ from those that workers are given.
        around = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | own
        try:
            usable = _succeeds([PROGRAM, "-d"], around) and _succeeds([sys.executable, "-c", PROBE], os.environ | own)
            if usable:
                os.environ.update(own)
            yield
        finally:
            for name in own:
                os.environ.pop(name, None)
            _succeeds([PROGRAM], around, "quit\n")


def _succeeds(command: list[str], environment: dict[str, str], said: str = "") -> bool:
    try:
        ended = subprocess.run(  # noqa: S603 (the two programs above)
            command, env=environment, input=said, text=True, capture_output=True, check=False, timeout=SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ended.returncode == 0

"""How much memory a run took, and what to do when it was too little."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from its2clr.errors import TrainingError
from its2clr.wording import readable_size

ADVICE = {
    "pretrain": "lower pretrain.batch_size (and pretrain.learning_rate with it)",
    "refine": "lower refine.batch_size",
    "end_to_end": "lower end_to_end.tiles_per_pass, which changes memory and time but not the result",
    "extract": "lower engine.extract_batch_size",
}
"""What a stage that runs out of memory may change."""


def peak_memory(device: torch.device) -> dict[str, int]:
    """Most bytes this process held so far: of host memory and, on a GPU, of its memory."""
    unit = 1 if sys.platform == "darwin" else 1024
    found = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    return found if device.type != "cuda" else {"GPU": torch.cuda.max_memory_reserved(device), **found}


def said_peak_memory(device: torch.device) -> str:
    """One line for the log."""
    return "peak memory: " + ", ".join(f"{readable_size(size)} {place}" for place, size in peak_memory(device).items())


@contextmanager
def memory_advice(stage: str) -> Iterator[None]:
    """Turn running out of memory into an error that says which setting to change.

    Args:
        stage: A key of `ADVICE`.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not _is_memory(error):
            raise
        on_gpu = isinstance(error, torch.OutOfMemoryError)
        place, tiles = "host", "in a file with engine.tiles=disk"
        if on_gpu:
            place, tiles = "GPU", "off the GPU with engine.tiles=memory"
        raise TrainingError(
            f"{stage}: out of {place} memory. To need less, {ADVICE[stage]}, or keep the decoded tiles {tiles}; see "
            "also what else runs on this machine. What was finished is kept; settings that do not start with engine. "
            f"need a new run folder. The system says: {str(error).partition(chr(10))[0]}"
        ) from error


def _is_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)

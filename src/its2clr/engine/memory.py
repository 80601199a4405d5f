"""How much memory a run used, and what to do if there was too little."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from its2clr.errors import TrainingError
from its2clr.memory_limit import is_out_of_memory
from its2clr.wording import readable_size

ADVICE = {
    "pretrain": "lower pretrain.batch_size (and pretrain.learning_rate with it)",
    "refine": "lower refine.batch_size",
    "end_to_end": "lower end_to_end.tiles_per_pass, which changes memory and time but not the result",
    "extract": "lower engine.extract_batch_size",
}
"""What to change if a stage runs out of memory."""


def peak_memory(device: torch.device) -> dict[str, int]:
    """Largest number of bytes this process has used so far: host memory and, on a GPU, GPU memory."""
    unit = 1 if sys.platform == "darwin" else 1024
    found = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    return found if device.type != "cuda" else {"GPU": torch.cuda.max_memory_reserved(device), **found}


def said_peak_memory(device: torch.device) -> str:
    """One line about peak memory, for the log."""
    return "peak memory: " + ", ".join(f"{readable_size(size)} {place}" for place, size in peak_memory(device).items())


@contextmanager
def memory_advice(stage: str) -> Iterator[None]:
    """If memory runs out, raise an error that says which setting to change.

    Args:
        stage: A key of `ADVICE`.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        on_gpu = isinstance(error, torch.OutOfMemoryError)
        place, tiles = "host", "in a file with engine.tiles=disk"
        if on_gpu:
            place, tiles = "GPU", "off the GPU with engine.tiles=memory"
        raise TrainingError(
            f"{stage}: out of {place} memory. To need less, {ADVICE[stage]}, or keep the decoded tiles {tiles}. Check "
            "also what else runs on this machine. Finished work is kept. To change a setting that does not start with "
            f"engine., use a new run folder. The system says: {str(error).partition(chr(10))[0]}"
        ) from error

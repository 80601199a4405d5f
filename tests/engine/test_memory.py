import pytest
import torch

from its2clr.engine.memory import memory_advice, peak_memory, readable_size, said_peak_memory
from its2clr.errors import TrainingError

CPU = torch.device("cpu")


def test_peak_of_the_host_grows_with_what_is_held():
    before = peak_memory(CPU)["host"]
    held = torch.ones(before // 4 + 2**24)  # four bytes each
    assert peak_memory(CPU)["host"] >= held.nbytes
    assert said_peak_memory(CPU).startswith("peak memory: ")


def test_sizes_are_readable():
    assert [readable_size(size) for size in (10, 2048, 3.25 * 2**30, 2**41)] == ["10 B", "2 KiB", "3.25 GiB", "2 TiB"]


@pytest.mark.parametrize(
    ("stage", "error", "said"),
    [
        (
            "pretrain",
            torch.OutOfMemoryError("CUDA out of memory.\nTried"),
            "GPU memory.*pretrain.batch_size.*tiles=mem",
        ),
        ("refine", MemoryError(), "host memory.*refine.batch_size.*tiles=disk"),
        ("end_to_end", torch.OutOfMemoryError("CUDA out of memory."), "end_to_end.tiles_per_pass"),
    ],
)
def test_running_out_of_memory_is_answered_with_the_setting_to_change(stage, error, said):
    with pytest.raises(TrainingError, match=said), memory_advice(stage):
        raise error


def test_host_memory_that_torch_cannot_have():
    with pytest.raises(TrainingError, match=r"host memory.*extract_batch_size"), memory_advice("extract"):
        torch.empty(2**60, dtype=torch.uint8)


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="shapes"), memory_advice("refine"):
        raise RuntimeError("shapes do not fit")

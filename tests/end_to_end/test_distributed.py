import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.end_to_end.commands import environment, its2clr, tiny_settings
from tests.end_to_end.distributed_worker import build, losses

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def test_two_processes_give_the_losses_and_gradients_of_one_with_the_joined_batch(tmp_path):
    generator = torch.Generator().manual_seed(1)
    data = {
        "first": torch.randn(12, 6, generator=generator, dtype=torch.float64),
        "second": torch.randn(12, 6, generator=generator, dtype=torch.float64),
        "labels": torch.randint(0, 2, (12,), generator=generator),
        "anchors": torch.randint(0, 2, (12,), generator=generator, dtype=torch.uint8),
    }
    save_file(data, tmp_path / "data.safetensors")
    worker = Path(__file__).with_name("distributed_worker.py")
    subprocess.run(
        [*TORCHRUN, worker, tmp_path / "data.safetensors", tmp_path / "found.safetensors"],
        check=True,
        env=environment(),
        timeout=120,
    )
    found = load_file(tmp_path / "found.safetensors")
    expected = losses(build(), data, torch.arange(12))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-12), name
        assert value.abs().sum() > 0


@pytest.mark.slow
def test_end_to_end_training_in_two_processes_equals_one(tiny_cohort, tmp_path):
    still = (
        "{jitter_probability: 0, grayscale_probability: 0, blur_probability: 0, horizontal_flip: 0, vertical_flip: 0}"
    )
    settings = [
        "--set", "end_to_end.start=scratch", "--set", "end_to_end.epochs=2", "--set", "end_to_end.bags_per_step=4",
        "--set", "end_to_end.tiles_per_pass=8", "--set", f"end_to_end.views={still}", "--set", "aggregator.options={}",
    ]  # fmt: skip
    trained = []
    for processes in (1, 2):
        run = tmp_path / f"run{processes}"
        its2clr("end-to-end", tiny_cohort, "--out", run, *tiny_settings(), *settings, processes=processes)
        trained.append(load_file(run / "checkpoints" / "end_to_end.safetensors"))
    # Parameters; running statistics of batch norm are those of the first process's bags.
    names = [
        name for name in trained[0] if name.startswith("network.") and "running" not in name and "num_b" not in name
    ]
    assert len(names) > 20
    for name in names:
        torch.testing.assert_close(trained[1][name], trained[0][name], rtol=1e-3, atol=1e-5, msg=name)

import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.end_to_end.commands import environment, its2clr, tiny_settings
from tests.end_to_end.test_distributed import TORCHRUN
from tests.pretrain.distributed_methods import METHODS, step_of

QUEUE = "moco.contrast.memory_bank.bank"


def test_two_processes_give_the_losses_and_gradients_of_one_with_the_joined_batch(tmp_path):
    generator = torch.Generator().manual_seed(1)
    data = {
        name: torch.rand(8, 3, 32, 32, generator=generator, dtype=torch.float64)
        for name in ("first", "second", "crops")
    }
    data["labels"] = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1])
    save_file(data, tmp_path / "data.safetensors")
    worker = Path(__file__).with_name("distributed_methods.py")
    subprocess.run(
        [*TORCHRUN, worker, tmp_path / "data.safetensors", tmp_path / "found"],
        check=True,
        env=environment(),
        timeout=120,
    )
    first, second = (load_file(tmp_path / f"found-{rank}.safetensors") for rank in (0, 1))
    expected = {}
    for name in METHODS:
        expected |= step_of(name, data, torch.arange(8))
    joined = torch.cat([torch.arange(0, 8, 2), torch.arange(1, 8, 2)])  # keys are gathered process by process
    expected[QUEUE][:8] = expected[QUEUE][joined]
    assert first.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(first[name], second[name]), name  # copies, queue and centre are the same everywhere
        torch.testing.assert_close(first[name], value, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.slow
def test_a_pretraining_with_momentum_queue_and_checks_runs_in_two_processes(tiny_cohort, tmp_path):
    changes = ("method=moco", "queue_size=64", "check_every=1", "check_epochs=1", "epochs=1")
    settings = [part for change in changes for part in ("--set", f"pretrain.{change}")]
    result = its2clr("pretrain", tiny_cohort, "--out", tmp_path / "run", *tiny_settings(), *settings, processes=2)
    assert (tmp_path / "run" / "checkpoints" / "encoder-start.safetensors").is_file()
    assert result.stdout.count("pretrain: moco on") == 1


@pytest.mark.slow
def test_dino_with_all_its_settings_in_two_processes_equals_one(tiny_cohort, tmp_path):
    """Views that change nothing, and no local crops: the draws of two processes differ from those of one."""
    still = ", ".join(f"{name}: 0" for name in ("jitter_probability", "grayscale_probability", "blur_probability"))
    head = (
        "{hidden_dim: 16, bottleneck_dim: 8, output_dim: 12, local_views: 0, norm_last_layer: false, frozen_epochs: 1"
    )
    changes = [
        "encoder.name=vit_small_patch16_224",
        "encoder.options={img_size: 32, embed_dim: 24, depth: 2, num_heads: 3}",
        "pretrain.method=dino",
        f"pretrain.views={{{still}, horizontal_flip: 0, vertical_flip: 0, crop_scale: null}}",
        f"pretrain.dino={head}, teacher_temperature: 0.07, teacher_warmup_epochs: 2}}",
        "pretrain.gradient_clip=0.001",
        "pretrain.learning_rate=1.0",
    ]
    settings = [part for change in changes for part in ("--set", change)]
    trained = []
    for processes in (1, 2):
        run = tmp_path / f"run{processes}"
        its2clr("pretrain", tiny_cohort, "--out", run, *tiny_settings(), *settings, processes=processes)
        trained.append(load_file(run / "checkpoints" / "pretrain.safetensors"))
    one, two = ({name: value for name, value in found.items() if "network." in name} for found in trained)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-5, msg=name)
    lengths = one["network.student.head.last_layer.weight_g"]
    assert not torch.equal(lengths, torch.ones_like(lengths))

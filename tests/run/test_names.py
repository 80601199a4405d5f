"""What a run's encoders are called says what they are."""

import pytest

from its2clr.run.names import encoder_names, start_name
from its2clr.run.opening import open_run
from its2clr.settings import resolve_config


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "SimCLR"),
        ({"pretrain.method": "moco"}, "MoCo"),
        ({"pretrain.method": "byol"}, "BYOL"),
        ({"pretrain.method": "dino"}, "DINO"),
        ({"pretrain.method": "bag_labels"}, "Bag labels on tiles"),
        ({"pretrain.epochs": 0}, "Random"),
        ({"pretrain.epochs": 0, "encoder.pretrained": True}, "Pretrained weights"),
        ({"pretrain.start": "elsewhere.safetensors"}, "Given start"),
        ({"pretrain.start": "runs/a/checkpoints/encoder-refined.safetensors"}, "Refined before"),
    ],
)
def test_a_start_is_called_what_it_is(settings, name):
    config = resolve_config("demo", settings)
    assert start_name(config) == encoder_names(config)["start"] == name


def test_a_start_from_another_run_is_called_as_it_is_there(tmp_path, tiny_cohort):
    open_run(tmp_path / "a", tiny_cohort, "demo", {"pretrain.method": "byol"}, quiet=True)
    for start in (tmp_path / "a", tmp_path / "a" / "checkpoints" / "encoder-start.safetensors"):
        assert start_name(resolve_config("demo", {"pretrain.start": str(start)})) == "BYOL"

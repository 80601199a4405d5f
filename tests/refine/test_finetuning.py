"""Partial finetuning: what is frozen stays as it was, and low-rank changes end up in plain weights."""

import pytest
import torch
from tests.conftest import TINY

from its2clr.config import LoraSettings, RefineConfig
from its2clr.encoders.encoder import create_encoder
from its2clr.encoders.weights import create_network, load_network
from its2clr.engine.checkpoint import load_checkpoint
from its2clr.errors import InputError
from its2clr.refine.finetuning import freeze_until, limit_training, without_lora
from its2clr.run.opening import open_run
from its2clr.settings import resolve_config

VIT = [
    *TINY,
    "encoder.name=vit_small_patch16_224",
    "encoder.options={img_size: 32, embed_dim: 24, depth: 2, num_heads: 3}",
    "pretrain.epochs=0",
    "refine.epochs=2",
    "refine.refresh_every=1",
    "refine.steps_per_epoch=2",
]


def vit():
    return create_encoder("vit_small_patch16_224", img_size=32, embed_dim=24, depth=2, num_heads=3)


def resnet():
    return create_encoder("resnet18", channels=[8, 8, 16, 16], stem_width=8)


def trainable(encoder):
    return {name for name, parameter in encoder.backbone.named_parameters() if parameter.requires_grad}


def test_everything_up_to_the_block_is_frozen_and_its_batch_norm_stands_still():
    encoder = resnet().train()
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    freeze_until(encoder, "layer2")
    optimiser = torch.optim.SGD(encoder.parameters(), lr=0.1)
    encoder.train()(torch.rand(4, 3, 32, 32)).square().sum().backward()
    optimiser.step()
    changed = {name for name, tensor in encoder.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all(name.startswith(("backbone.layer3", "backbone.layer4")) for name in changed)
    assert any("running_mean" in name for name in changed)
    assert not encoder.backbone.bn1.training
    assert encoder.backbone.layer3.training
    assert not encoder.eval().backbone.layer3.training


def test_parts_of_a_sequence_are_blocks_and_positions_stand_before_all():
    encoder = vit()
    freeze_until(encoder, "blocks.0")
    assert all(name.startswith(("blocks.1", "norm")) for name in trainable(encoder))
    assert any(name.startswith("blocks.1") for name in trainable(encoder))
    freeze_until(encoder := vit(), "patch_embed")
    assert not {"cls_token", "pos_embed"} & trainable(encoder)
    assert any(name.startswith("blocks.0") for name in trainable(encoder))


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (resnet, {"freeze_until": "layer9"}, r"no block 'layer9'; it has conv1, bn1.*layer1.0"),
        (resnet, {"freeze_until": "layer4"}, "leaves nothing of the encoder to train"),
        (resnet, {"lora": LoraSettings()}, r"no linear layer.*attn.qkv.*none: LoRA is for transformers"),
        (vit, {"lora": LoraSettings(targets=["attn.q"])}, r"named attn.q; it has attn.proj, attn.qkv, mlp.fc1"),
    ],
)
def test_a_wrong_name_is_answered_with_the_names_there_are(make, settings, message):
    with pytest.raises(InputError, match=message):
        limit_training(make(), RefineConfig(**settings), 0)


def test_without_peft_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"its2clr\[lora\]"):
        limit_training(vit(), RefineConfig(lora=LoraSettings()), 0)


def test_both_at_once_are_refused():
    with pytest.raises(InputError, match="freeze_until and lora"):
        resolve_config("demo", {"refine.freeze_until": "blocks.0", "refine.lora": {}})


def test_low_rank_changes_are_merged_into_plain_weights():
    torch.manual_seed(0)
    network = create_network(resolve_config("demo", VIT))
    plain_keys = set(network.state_dict())
    limit_training(network.encoder, RefineConfig(lora=LoraSettings(rank=2)), 0)
    assert all("lora_" in name for name in trainable(network.encoder))
    assert len(trainable(network.encoder)) == 2 * 2 * 2  # A and B of two layers in two blocks
    images = torch.rand(3, 3, 32, 32)
    start = network.eval()(images)[0]
    for name, parameter in network.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    changed = network.eval()(images)[0]
    assert not torch.allclose(start, changed, atol=1e-3)
    merged = without_lora(network)
    assert set(merged.state_dict()) == plain_keys
    torch.testing.assert_close(merged.eval()(images)[0], changed, rtol=1e-4, atol=1e-5)
    assert torch.equal(network.eval()(images)[0], changed)  # the one that is trained is left alone
    assert without_lora(merged) is merged


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["refine.lora={rank: 2}", "refine.freeze_until=blocks.0"])
def test_a_run_refines_within_its_limits_and_goes_on_as_it_would_have(tiny_cohort, tmp_path, limit):
    whole = open_run(tmp_path / "whole", tiny_cohort, "demo", [*VIT, limit], quiet=True)
    whole.refine()
    first, refined = (load_checkpoint(whole.run.checkpoint(f"encoder-{name}"))[0] for name in ("start", "refined"))
    assert first.keys() == refined.keys()
    load_network(whole.run.checkpoint("encoder-refined"))  # plain weights of the configured encoder
    last = load_checkpoint(whole.run.checkpoint("refine"))[0]
    if "lora" in limit:
        base = last["network.encoder.backbone.blocks.1.attn.qkv.base_layer.weight"]
        assert last["network.encoder.backbone.blocks.1.attn.qkv.lora_B.default.weight"].abs().sum() > 0
    else:
        base = last["network.encoder.backbone.blocks.0.attn.qkv.weight"]
    assert torch.equal(base, first[f"encoder.backbone.blocks.{int('lora' in limit)}.attn.qkv.weight"])

    stopped = open_run(tmp_path / "stopped", tiny_cohort, "demo", [*VIT, limit], quiet=True)
    stop_after(stopped.run, "refine", 1, stopped.refine)
    again = open_run(tmp_path / "stopped", tiny_cohort, "demo", [*VIT, limit], quiet=True)
    again.refine()
    there = load_checkpoint(again.run.checkpoint("refine"))[0]
    assert all(torch.equal(tensor, there[name]) for name, tensor in last.items())


class StoppedError(Exception):
    """As if the process had been killed."""


def stop_after(run, stage, epoch, work):
    """Do work until the epoch of a stage was logged and saved, then stop as if killed in the next one."""
    log = run.log

    def logging(name, number, *rest):
        if name == stage and number > epoch:
            raise StoppedError
        log(name, number, *rest)

    run.log = logging
    with pytest.raises(StoppedError):
        work()

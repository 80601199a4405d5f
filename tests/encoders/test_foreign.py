"""Checkpoints in the layouts of other projects, written here, give the features of the networks they came from."""

import argparse
import json

import huggingface_hub
import pytest
import timm
import torch
import torchvision
from lightly.models.modules import SimCLRProjectionHead
from safetensors.torch import save_file
from tests.conftest import TINY
from torch import nn
from typer.testing import CliRunner

from its2clr.cli import app
from its2clr.config import EncoderConfig, ProjectorConfig, RunConfig
from its2clr.encoder_export.network_files import write_timm_folder
from its2clr.encoders.encoder import create_encoder
from its2clr.encoders.foreign import load_weights, match_weights, report_weights
from its2clr.encoders.weight_files import read_weights, released_with, with_constants
from its2clr.encoders.weights import create_network, save_network
from its2clr.errors import InputError
from its2clr.settings import resolve_config

TILES = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)).double()
VIT = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 2}


def randomised(network: nn.Module) -> nn.Module:
    """A network with statistics that matter, as after training."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in network.state_dict().items():
        if name.endswith("running_var"):
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
        elif tensor.is_floating_point() and tensor.ndim == 1:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1 + (1 if name.endswith("weight") else 0))
    return network.eval()


def resnet(kind: str = "resnet18", **options) -> nn.Module:
    torch.manual_seed(0)
    return randomised(getattr(torchvision.models, kind)(**options))


def features(network: nn.Module, kind: type[nn.Module] = torchvision.models.ResNet) -> torch.Tensor:
    """What the source network sees: normalised tiles, its head taken off."""
    assert isinstance(network, kind)
    network.fc = nn.Identity()
    with torch.no_grad():
        return network.double()(normalised(TILES))


def normalised(tiles: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (EncoderConfig().mean, EncoderConfig().std))
    return (tiles - mean) / std


def prefixed(prefix: str, network: nn.Module) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in network.state_dict().items()}


def settings(**encoder) -> RunConfig:
    projector = {"hidden_dim": 512, "output_dim": 256, "norm": "none"}
    return RunConfig(encoder=EncoderConfig(**encoder), projector=ProjectorConfig(**projector))


def reported(path, **encoder):
    """What is said of a file's weights, and the network that took them."""
    config = with_constants(settings(weights=str(path), **encoder))
    network = create_network(config).eval()
    return load_weights(network, read_weights(config.encoder.weights), config.encoder), network


def loaded(path, **encoder):
    """Features of a network that took a file's weights, the report, and the network."""
    report, network = reported(path, **encoder)
    with torch.no_grad():  # in double precision: the order of sums, which memory layouts change, is then no matter
        return network.double().encoder(TILES), report, network


def head() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 256))


@pytest.mark.parametrize("kind", ["resnet18", "resnet50"])
def test_torchvision(kind, tmp_path):
    source = resnet(kind)
    torch.save(source.state_dict(), tmp_path / "model.pth")
    found, report, _ = loaded(tmp_path / "model.pth", name=kind)
    assert torch.allclose(found, features(source), atol=1e-6)
    assert report.share == 1
    assert report.missing == report.other_shape == report.excess == ()
    assert report.unused == ("fc.weight", "fc.bias")
    assert "does not say" in report.constants


def wrapped(layout: str) -> dict:
    """Content of a checkpoint of `resnet()`, with a decoy where the layout has a second network."""
    source, decoy = resnet(), resnet(zero_init_residual=True)
    decoy.conv1.weight.data.mul_(2)
    numbered = nn.Sequential(*list(source.children())[:-1])  # as in lightly's tutorials
    return {
        "lightning": {
            "state_dict": prefixed("backbone.", source) | prefixed("backbone_momentum.", decoy),
            "hyper_parameters": {"lr": 0.1},
        },
        "lightly": {
            "state_dict": prefixed("backbone.", numbered)
            | prefixed("projection_head.", SimCLRProjectionHead(512, 512, 256)),
        },
        "moco": {
            "arch": "resnet18",
            "state_dict": prefixed("module.encoder_q.", source) | prefixed("module.encoder_k.", decoy),
            "optimizer": {"state": {0: torch.rand(3)}},
        },
        "dino": {"student": prefixed("module.backbone.", decoy), "teacher": prefixed("backbone.", source)},
        "compiled": {"model": prefixed("_orig_mod.", source), "args": argparse.Namespace(lr=0.1)},
        "student only": prefixed("student_backbone.", source),
        "distributed": {"model": prefixed("module.", source)},
        "two copies": prefixed("net_before.", decoy) | prefixed("net.", source),
        "double": {"net": {name: tensor.double() for name, tensor in source.state_dict().items()}},
    }[layout]


LAYOUTS = ("lightning", "lightly", "moco", "dino", "compiled", "student only", "distributed", "two copies", "double")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrappers(layout, tmp_path):
    torch.save(wrapped(layout), tmp_path / "file.ckpt")
    found, report, _ = loaded(tmp_path / "file.ckpt")
    assert torch.allclose(found, features(resnet()), atol=1e-6)
    assert report.share == 1
    assert not any(unused.startswith("optimizer") for unused in report.unused)


class ResNetSimCLR(nn.Module):
    """The layout of dsmil-wsi's checkpoints: simclr/models/resnet_simclr.py."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        source = torchvision.models.resnet18(norm_layer=nn.InstanceNorm2d)
        self.features = nn.Sequential(*list(source.children())[:-1])
        self.l1 = nn.Linear(512, 512)
        self.l2 = nn.Linear(512, 256)

    def forward(self, tiles):
        pooled = self.features(tiles).flatten(1)
        return pooled, self.l2(torch.relu(self.l1(pooled)))


def test_dsmil_wsi_after_compute_feats(tmp_path):
    torch.manual_seed(0)
    source = torchvision.models.resnet18(norm_layer=nn.InstanceNorm2d).eval()
    source.fc = nn.Identity()
    torch.save(prefixed("feature_extractor.", source) | {"fc.weight": torch.rand(1, 512)}, tmp_path / "embedder.pth")
    found, report, _ = loaded(tmp_path / "embedder.pth", norm="instance")
    with torch.no_grad():
        assert torch.allclose(found, source.double()(TILES), atol=1e-6)
    assert report.unused == ("fc.weight",)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_dsmil_wsi(prefix, tmp_path):
    source = ResNetSimCLR().eval()
    torch.save(prefixed(prefix, source), tmp_path / "model.pth")
    found, report, network = loaded(tmp_path / "model.pth", norm="instance")
    with torch.no_grad():
        pooled, projected = source.double()(TILES)  # as they are, in [0, 1]
        assert torch.allclose(found, pooled, atol=1e-6)
        assert torch.allclose(network(TILES)[1], projected, atol=1e-6)
    assert report.projector.startswith(f"loaded from {prefix}l1")
    assert report.unused == ()
    assert "dsmil-wsi" in report.constants

    with pytest.raises(InputError, match=r"set encoder\.norm=instance"):
        loaded(tmp_path / "model.pth", norm="batch")


def test_its2clr_of_the_paper(tmp_path):
    torch.manual_seed(0)
    source = torchvision.models.resnet18(norm_layer=nn.InstanceNorm2d)
    source.fc = head()
    torch.save({"net": prefixed("module.resnet.", source), "optimizer": {"state": {}}}, tmp_path / "epoch3model.pth")
    found, report, network = loaded(tmp_path / "epoch3model.pth", norm="instance")
    with torch.no_grad():
        assert torch.allclose(network(TILES)[1], source.eval().double()(TILES), atol=1e-6)
        source.fc = nn.Identity()
        assert torch.allclose(found, source(TILES), atol=1e-6)
    assert report.projector.startswith("loaded from net.module.resnet.fc.0")
    assert any("BGR" in note for note in report.notes)


def test_weights_of_batch_norm_are_refused_for_instance_norm(tmp_path):
    torch.save(resnet().state_dict(), tmp_path / "model.pth")
    with pytest.raises(InputError, match=r"set encoder\.norm=batch"):
        loaded(tmp_path / "model.pth", norm="instance")


def test_a_head_of_other_shape_is_not_loaded_and_said(tmp_path):
    source = resnet()
    source.fc = nn.Sequential(nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 64))
    torch.save({"state_dict": prefixed("module.encoder_q.", source)}, tmp_path / "moco.pth")
    _, report, _ = loaded(tmp_path / "moco.pth")
    assert "projector.hidden_dim=128 projector.output_dim=64" in report.projector


def test_the_head_is_that_of_the_network_that_is_taken(tmp_path):
    online, momentum = resnet(), resnet()
    online.fc, momentum.fc = head(), head()
    momentum.fc[2].weight.data.mul_(2)
    content = prefixed("module.encoder_k.", momentum) | prefixed("module.encoder_q.", online)
    torch.save({"state_dict": content}, tmp_path / "moco.pth")
    _, report, network = loaded(tmp_path / "moco.pth")
    assert report.projector.startswith("loaded from state_dict.module.encoder_q.fc.0")
    assert torch.equal(network.float().head[2].weight, online.fc[2].weight)
    assert set(report.unused) == {f"state_dict.{name}" for name in prefixed("module.encoder_k.", momentum)}


def test_the_head_is_that_of_the_network_that_fits(tmp_path):
    content = {}
    for number, kind in enumerate(("resnet18", "resnet34")):
        network = resnet(kind)
        network.fc = head()
        network.fc[2].bias.data.fill_(number)
        content[kind] = network.state_dict()
    torch.save(content, tmp_path / "both.pth")
    _, _, network = loaded(tmp_path / "both.pth", name="resnet34")
    assert torch.equal(network.float().head[2].bias, torch.ones(256))


def test_dino_from_timm_takes_the_teacher_and_fits_another_tile_size(tmp_path):
    torch.manual_seed(0)
    name = "vit_small_patch16_224"
    teacher, student = (randomised(timm.create_model(name, num_classes=0, **VIT)) for _ in range(2))
    content = {
        key: prefixed("module.backbone.", network) | {"module.head.mlp.0.weight": torch.rand(4, 48)}
        for key, network in (("student", student), ("teacher", teacher))
    }
    torch.save(content, tmp_path / "checkpoint.pth")
    found, report, _ = loaded(tmp_path / "checkpoint.pth", name=name, options=VIT)
    with torch.no_grad():
        assert torch.allclose(found, teacher.double()(normalised(TILES)), atol=1e-6)
    teacher.float()
    assert "teacher.module.backbone." in report.layout
    assert report.share == 1
    assert len(report.unused) == len(student.state_dict()) + 2

    larger = {**VIT, "img_size": 96}
    report, network = reported(tmp_path / "checkpoint.pth", name=name, options=larger)
    assert report.resized == ("pos_embed 1x17x48 -> 1x37x48",)
    by_timm = timm.models.vision_transformer.checkpoint_filter_fn(teacher.state_dict(), network.encoder.backbone)
    assert torch.equal(network.encoder.backbone.pos_embed, by_timm["pos_embed"])


def test_an_exported_vit_for_another_image_size(tmp_path):
    """Positions are resampled to the size that is set, and the report says so; the file's own size is no advice."""
    name = "vit_small_patch16_224"
    config = EncoderConfig(name=name, options=VIT)
    source = create_encoder(config)
    write_timm_folder(tmp_path, source, config, 64)
    for size in (64, [64, 64]):
        _, report, network = loaded(tmp_path, name=name, options={**VIT, "img_size": size})
        assert report.notes == report.resized == ()
        assert torch.equal(network.float().encoder.backbone.pos_embed, source.backbone.pos_embed)
    report, network = reported(tmp_path, name=name, options={**VIT, "img_size": 96})
    assert report.resized == ("pos_embed 1x17x48 -> 1x37x48",)
    (note,) = report.notes
    assert (
        "of 4 x 4 patches (images of 64 px), are resampled to the 6 x 6 (96 px) that this encoder is built for" in note
    )
    assert "encoder.options.img_size=64 would take them as they are" in note
    assert network.encoder(torch.rand(2, 3, 96, 96)).shape == (2, 48)

    without = {key: value for key, value in VIT.items() if key != "img_size"}
    (note,) = reported(tmp_path, name=name, options={**without, "dynamic_img_size": True})[0].notes
    assert "to the 14 x 14 (224 px) that this encoder is built for, and again for tiles of another size" in note
    assert "encoder.options.img_size=64 spares the first" in note


def test_options_that_a_vit_needs_are_named(tmp_path):
    name = "vit_small_patch16_224"
    needed = {"init_values": 0.1, "reg_tokens": 4, "no_embed_class": True}
    torch.save(timm.create_model(name, num_classes=0, **VIT, **needed).state_dict(), tmp_path / "vit.pth")
    with pytest.raises(InputError, match=r"(?s)takes 8\d.*init_values: 1\.0e-5.*reg_tokens: 4"):
        loaded(tmp_path / "vit.pth", name=name, options={**VIT, "no_embed_class": True})
    _, report, _ = loaded(tmp_path / "vit.pth", name=name, options={**VIT, **needed})
    assert report.share == 1
    assert report.notes == ()


def test_weights_that_timm_knows_how_to_convert(tmp_path):
    """DINOv2's giant, as its authors name it: a gated MLP in one matrix, w12, and w3."""
    name, options = "vit_giant_patch14_dinov2", {"img_size": 56, "embed_dim": 48, "depth": 4, "num_heads": 2}
    torch.manual_seed(0)
    source = randomised(timm.create_model(name, num_classes=0, **options))
    state = {key.replace("fc1", "w12").replace("fc2", "w3"): tensor for key, tensor in source.state_dict().items()}
    torch.save(state | {"mask_token": torch.zeros(1, 48)}, tmp_path / "dinov2.pth")
    report, network = reported(tmp_path / "dinov2.pth", name=name, options=options)
    assert "converted by timm" in report.layout
    assert report.share == 1
    for key, tensor in source.state_dict().items():
        assert torch.equal(network.encoder.backbone.state_dict()[key], tensor), key
    config = settings(name=name, options={**options, "depth": 3})
    report = match_weights(create_network(config), read_weights(tmp_path / "dinov2.pth"), config.encoder).report
    assert "blocks.3.mlp.w12.weight" in report.excess  # by the file's name


CLIP = {
    "norm_pre": "ln_pre", "norm.": "ln_post.", "norm1": "ln_1", "norm2": "ln_2", "blocks": "transformer.resblocks",
    "qkv.": "in_proj_", "attn.proj": "attn.out_proj", "fc1": "c_fc", "fc2": "c_proj",
    "patch_embed.proj": "conv1", "pos_embed": "positional_embedding", "cls_token": "class_embedding",
}  # fmt: skip


def test_timm_converts_what_is_below_a_wrapper_too(tmp_path):
    """OpenAI's CLIP, as a training script saved it."""
    name = "vit_base_patch16_clip_224"
    torch.manual_seed(0)
    source = randomised(timm.create_model(name, num_classes=0, **VIT))
    state = source.state_dict()
    state |= {"cls_token": state["cls_token"][0, 0], "pos_embed": state["pos_embed"][0]}
    for ours, theirs in CLIP.items():
        state = {key.replace(ours, theirs): tensor for key, tensor in state.items()}
    content = {f"visual.{key}": tensor for key, tensor in state.items()} | {"logit_scale": torch.zeros(())}
    torch.save({"state_dict": content}, tmp_path / "clip.pth")
    found, report, _ = loaded(tmp_path / "clip.pth", name=name, options=VIT)
    assert report.layout == "timm's names after 'state_dict.', converted by timm"
    assert report.share == 1
    with torch.no_grad():
        assert torch.allclose(found, source.double()(normalised(TILES)), atol=1e-6)


def test_names_that_need_no_conversion_are_taken_as_they_are(tmp_path):
    """OpenCLIP around a timm network: timm could unwrap it, but then nothing would be said of the rest of the file."""
    name = "vit_small_patch16_224"
    state = timm.create_model(name, num_classes=0, **VIT).state_dict()
    content = {f"visual.trunk.{key}": tensor for key, tensor in state.items()} | {"text.weight": torch.zeros(2)}
    torch.save(content, tmp_path / "open_clip.pth")
    _, report, _ = loaded(tmp_path / "open_clip.pth", name=name, options=VIT)
    assert report.layout == "timm's names after 'visual.trunk.'"
    assert report.unused == ("text.weight",)


def test_a_converter_that_would_spoil_the_names_is_not_used(tmp_path):
    """timm takes a Swin without a classifier for an old one and renames its layers."""
    name, options = "swin_tiny_patch4_window7_224", {"img_size": 64, "window_size": 2, "embed_dim": 12}
    source = timm.create_model(name, num_classes=0, **options)
    torch.save(source.state_dict(), tmp_path / "swin.pth")
    _, report, _ = loaded(tmp_path / "swin.pth", name=name, options=options)
    assert (report.share, report.layout, report.unused) == (1, "timm's names", ())


def test_registers_of_dinov2_are_no_other_image_size(tmp_path):
    """timm adds the first position to the class token and keeps the rest: another shape, but the same places."""
    name, options = "vit_small_patch14_reg4_dinov2", {"img_size": 56, "embed_dim": 48, "depth": 2, "num_heads": 2}
    state = timm.create_model(name, num_classes=0, **options).state_dict()
    state |= {"register_tokens": state.pop("reg_token"), "mask_token": torch.zeros(1, 48)}
    state["pos_embed"] = torch.cat([torch.full((1, 1, 48), 0.25), state["pos_embed"]], dim=1)
    torch.save(state, tmp_path / "dinov2.pth")
    report, network = reported(tmp_path / "dinov2.pth", name=name, options=options)
    assert (report.share, report.notes) == (1, ())
    assert torch.equal(network.encoder.backbone.cls_token, state["cls_token"] + 0.25)


def test_patches_of_another_size_are_resampled_by_timm(tmp_path):
    name = "vit_small_patch16_224"
    torch.save(timm.create_model(name, num_classes=0, **VIT).state_dict(), tmp_path / "vit.pth")
    _, report, network = loaded(tmp_path / "vit.pth", name="vit_small_patch8_224", options=VIT)
    assert "converted by timm" in report.layout
    assert report.other_shape == report.missing == ()
    assert "patch_embed.proj.weight 48x3x16x16 -> 48x3x8x8" in report.resized
    assert report.notes == ()  # no img_size would take them as they are
    assert network.encoder.backbone.patch_embed.proj.weight.shape[-1] == 8


def test_a_torchvision_vit(tmp_path):
    torch.manual_seed(0)
    source = torchvision.models.VisionTransformer(64, 16, 2, 2, 48, 192).eval()
    for parameter in source.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    torch.save(source.state_dict(), tmp_path / "vit.pth")
    found, report, _ = loaded(tmp_path / "vit.pth", name="vit_small_patch16_224", options=VIT)
    source.heads = nn.Identity()
    with torch.no_grad():
        assert torch.allclose(found, source.double()(normalised(TILES)), atol=1e-6)
    assert report.share == 1
    report, _ = reported(tmp_path / "vit.pth", name="vit_small_patch16_224", options={**VIT, "img_size": 96})
    assert report.layout == "torchvision's names of a ViT, converted by timm"
    assert report.resized == ("pos_embed 1x17x48 -> 1x37x48",)


def test_safetensors_with_constants_in_it_or_beside_it(tmp_path):
    source = resnet()
    tensors = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    told = {"mean": "[0.5, 0.5, 0.5]", "std": "[0.25, 0.25, 0.25]"}
    save_file(tensors, tmp_path / "told.safetensors", metadata=told)
    _, report, network = loaded(tmp_path / "told.safetensors")
    assert torch.equal(network.encoder.mean.flatten(), torch.full((3,), 0.5).double())
    assert "from the file" in report.constants

    folder = tmp_path / "hub"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architecture": "resnet18",
        "model_args": {"drop_rate": 0.1},
        "pretrained_cfg": {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    for given in (folder, folder / "model.safetensors"):
        _, report, network = loaded(given)
        assert torch.allclose(network.encoder.std.flatten(), torch.tensor([0.4, 0.5, 0.6]).double())
    assert "the file names options that are not set: encoder.options={drop_rate: 0.1}" in report.notes
    _, report, network = loaded(folder, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    assert torch.equal(network.encoder.mean.flatten(), torch.zeros(3).double())
    assert "as set" in report.constants
    assert "(0.1, 0.2, 0.3)" in report.constants


def test_hub_names_are_fetched_by_timm(tmp_path, monkeypatch):
    source = timm.create_model("resnet18", num_classes=5, channels=[8, 8, 16, 16], stem_width=8)
    snapshot = tmp_path / "models--lab--encoder" / "snapshots" / ("a" * 40)
    timm.models.save_for_hf(randomised(source), snapshot, safe_serialization=True)
    (tmp_path / "models--lab--encoder" / "refs").mkdir()
    (tmp_path / "models--lab--encoder" / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    options = {"channels": [8, 8, 16, 16], "stem_width": 8}
    found, report, _ = loaded("hf-hub:lab/encoder", options=options)
    assert torch.allclose(found, features(source, timm.models.ResNet), atol=1e-6)
    assert "timm's config" in report.constants
    with pytest.raises(InputError, match="timm cannot get hf-hub:lab/nothing"):
        read_weights("hf-hub:lab/nothing")


def test_our_own_checkpoints_and_model_files(evaluated_run, tmp_path):
    config = resolve_config("demo", [*TINY, "encoder.mean=[0.1, 0.2, 0.3]"])
    torch.manual_seed(0)
    source = create_network(config).eval()
    randomised(source)
    save_network(tmp_path / "encoder.safetensors", source, config, {})
    fresh = with_constants(resolve_config("demo", [*TINY, f"encoder.weights={tmp_path / 'encoder.safetensors'}"]))
    assert fresh.encoder.mean == (0.1, 0.2, 0.3)
    network = create_network(fresh).eval()
    report = load_weights(network, read_weights(tmp_path / "encoder.safetensors"), fresh.encoder)
    with torch.no_grad():
        for ours, theirs in zip(network(TILES.float()), source(TILES.float()), strict=True):
            assert torch.equal(ours, theirs)
    assert report.unused == ()
    assert report.projector.startswith("loaded from head.0")
    wide = resolve_config("demo", ["encoder.name=resnet34"])
    with pytest.raises(InputError, match=r"the file says it is 'resnet18': set encoder\.name=resnet18"):
        load_weights(create_network(wide), read_weights(tmp_path / "encoder.safetensors"), wide.encoder)

    from its2clr.predict.model_of_run import export_model, model_of_run

    path = export_model(evaluated_run, tmp_path / "model.its2clr")
    network = create_network(fresh).eval()
    report = load_weights(network, read_weights(path), fresh.encoder)
    with torch.no_grad():
        expected = model_of_run(evaluated_run).members[0].encoder.backbone(TILES.float())
        assert torch.equal(network.encoder.backbone(TILES.float()), expected)
    assert report.unused == ()


WRONG = {
    "deeper": ({"name": "resnet18"}, lambda: resnet("resnet34"), r"takes 5\d\.\d% of the network"),
    "shallower": ({"name": "resnet34"}, lambda: resnet("resnet18"), r"missing, left as they were: 80"),
    "other kind": ({"name": "resnet18"}, lambda: resnet("resnet50"), r"of another shape, not loaded"),
    "other width": (
        {"name": "resnet18", "options": {"channels": [32, 64, 128, 256]}},
        resnet,
        r"layer1\.0\.conv1\.weight \(64x64x3x3 in the file, 32x64x3x3 in the encoder\)",
    ),
    "no network": ({"name": "resnet18"}, lambda: nn.Linear(3, 4), r"matched 0 of the encoder's 100 tensors"),
    "a vit": ({"name": "vit_small_patch16_224", "options": VIT}, resnet, r"0\.0% of the encoder"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_weights_fail_with_the_report(name, tmp_path):
    encoder, make, message = WRONG[name]
    torch.save(make().state_dict(), tmp_path / "model.pth")
    config = settings(**encoder)
    network = create_network(config)
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    with pytest.raises(InputError, match=rf"(?s)not weights of this encoder.*{message}") as error:
        load_weights(network, read_weights(tmp_path / "model.pth"), config.encoder)
    assert "unused" in str(error.value) or "of a part that" in str(error.value) or "another shape" in str(error.value)
    assert all(torch.equal(before[key], tensor) for key, tensor in network.state_dict().items())


def test_a_few_missing_tensors_are_said_and_the_limit_is_a_setting(tmp_path):
    state = resnet().state_dict()
    state.pop("layer4.1.bn2.bias")
    torch.save(state, tmp_path / "model.pth")
    _, report, _ = loaded(tmp_path / "model.pth")
    assert report.missing == ("layer4.1.bn2.bias",)
    assert any("layer4.1.bn2.bias" in line for line in report.lines())
    with pytest.raises(InputError, match=r"encoder\.weights_matched=1 asks for 100%"):
        loaded(tmp_path / "model.pth", weights_matched=1.0)
    few_but_large = {key: tensor for key, tensor in state.items() if not key.startswith("layer4") or tensor.ndim < 2}
    torch.save(few_but_large, tmp_path / "model.pth")
    with pytest.raises(InputError, match=r"2\d\.\d% of the encoder(?s:.*)matched 94 of the encoder's 100 tensors"):
        loaded(tmp_path / "model.pth")


def test_nothing_is_unpickled(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "module.pth")
    with pytest.raises(InputError, match=r"(?s)asks for torch\.nn\.modules\.linear\.Linear.*weights_only=False"):
        read_weights(tmp_path / "module.pth")
    for name, content in (("text.pth", b"hello"), ("cut.safetensors", b"\x10\0\0\0\0\0\0\0{"), ("empty.pt", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=r"encoder\.weights: .*" + name):
            read_weights(tmp_path / name)
    torch.save({"epoch": 3}, tmp_path / "none.pth")
    with pytest.raises(InputError, match="holds no tensors"):
        read_weights(tmp_path / "none.pth")
    with pytest.raises(InputError, match="hf-hub:OWNER/NAME"):
        read_weights(tmp_path / "nothing.pth")


def test_the_report_changes_nothing_and_reads_settings(tmp_path):
    torch.save(ResNetSimCLR().state_dict(), tmp_path / "model.pth")
    report = report_weights(str(tmp_path / "model.pth"), None, ["encoder.norm=instance", "projector.output_dim=256"])
    assert report.lines()[1] == "  matched 20 of the encoder's 20 tensors (100.0% of it)"
    assert list(tmp_path.iterdir()) == [tmp_path / "model.pth"]
    config = settings(norm="instance")
    network = create_network(config)
    before = network.encoder.backbone.conv1.weight.clone()
    match_weights(network, read_weights(tmp_path / "model.pth"), config.encoder)
    assert torch.equal(before, network.encoder.backbone.conv1.weight)


def test_the_command_prints_the_report_or_fails_with_it(tmp_path):
    torch.save(ResNetSimCLR().state_dict(), tmp_path / "model.pth")
    given = ["weights", str(tmp_path / "model.pth"), "--encoder", "resnet18"]
    result = CliRunner().invoke(app, [*given, "--norm", "instance"])
    assert result.exit_code == 0
    assert "matched 20 of the encoder's 20 tensors" in result.output
    failed = CliRunner().invoke(app, given)
    assert isinstance(failed.exception, InputError)
    assert "set encoder.norm=instance" in str(failed.exception)
    assert "matched 20 of the encoder's 100 tensors" in str(failed.exception)


def test_constants_of_timms_own_weights_and_of_a_begun_run():
    config = with_constants(settings(name="vit_small_patch16_224.augreg_in21k", pretrained=True))
    assert config.encoder.mean == (0.5, 0.5, 0.5)
    begun = settings(weights="/moved/away.pth", mean=(0.1, 0.1, 0.1))
    assert with_constants(settings(weights="/moved/away.pth"), begun).encoder.mean == (0.1, 0.1, 0.1)
    with pytest.raises(InputError, match="is not there"):
        with_constants(settings(weights="/moved/away.pth"))
    with pytest.raises(ValueError, match="set only one of them"):
        EncoderConfig(weights="a.pth", pretrained=True)


def test_only_the_layouts_of_research_code_imply_constants():
    assert released_with(["module.features.0.weight", "module.l1.weight"]) == "dsmil-wsi"
    assert released_with(["backbone.features.0.weight"]) is None
    assert released_with(["feature_extractor.conv1.weight", "fc.weight"]) == "dsmil-wsi"
    assert released_with(["feature_extractor.conv1.weight", "feature_extractor.bn1.weight"]) is None
    assert released_with(["conv1.weight", "layer1.0.conv1.weight"]) is None
    assert released_with(["resnet.conv1.weight", "resnet.fc.0.weight"]) == "ItS2CLR"
    assert released_with(["resnet.conv1.weight", "resnet.fc.0.weight", "resnet.bn1.weight"]) is None

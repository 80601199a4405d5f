"""What other software makes of an exported encoder: plain timm, ONNX runtime, torchmil's TRIDENT reader."""

import json
import subprocess
import sys

import h5py
import numpy as np
import onnxruntime
import pandas as pd
import pytest
import timm
import torch
import yaml
from PIL import Image
from torch import nn

from its2clr.cohort import Cohort, pack_images, read_manifest
from its2clr.cohort.features.feature_file import feature_path, read_feature_file
from its2clr.config import EncoderConfig, RunConfig
from its2clr.encoder_export import export_encoder
from its2clr.encoder_export.card import Exported, model_card
from its2clr.encoder_export.export import whole_folder
from its2clr.encoder_export.network_files import write_onnx, write_timm_folder
from its2clr.encoder_export.trident import write_trident
from its2clr.encoders.encoder import create_encoder
from its2clr.encoders.weight_files import read_weights
from its2clr.encoders.weights import load_network
from its2clr.errors import InputError

pytestmark = pytest.mark.xdist_group("encoder export")  # what they share is made once
TILES = torch.randint(0, 256, (5, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
SMALL = {"channels": [8, 8, 16, 16], "stem_width": 8}
VIT = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 2}


@pytest.fixture(scope="module")
def exported(evaluated_run, tmp_path_factory):
    out = tmp_path_factory.mktemp("exports") / "encoder"
    return export_encoder(evaluated_run, out, formats=("timm", "onnx", "features"), licence="CC-BY-4.0")


@pytest.fixture(scope="module")
def encoder(evaluated_run):
    return load_network(evaluated_run / "checkpoints" / "encoder-refined.safetensors").encoder.eval()


def by_timm(model: nn.Module, tiles: torch.Tensor = TILES) -> torch.Tensor:
    """Features by timm alone, laid out in memory as ours: the order of sums, and so the last bits, depend on it."""
    config = timm.data.resolve_model_data_config(model)
    mean, std = (torch.tensor(config[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    images = ((tiles.float() / 255 - mean) / std).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        return model.eval().to(memory_format=torch.channels_last)(images)


def ours(encoder: nn.Module, tiles: torch.Tensor = TILES) -> torch.Tensor:
    with torch.no_grad():
        return encoder.eval()(tiles)


def test_plain_timm_gives_identical_features(exported, encoder):
    model = timm.create_model(f"local-dir:{exported}", pretrained=True)
    assert model.num_classes == 0
    assert torch.equal(by_timm(model), ours(encoder))
    document = json.loads((exported / "config.json").read_text())
    older = timm.create_model(
        document["architecture"],
        num_classes=0,
        checkpoint_path=str(exported / "model.safetensors"),
        **document["model_args"],
    )
    assert torch.equal(by_timm(older, TILES), ours(encoder))


def test_timm_does_it_in_a_process_without_its2clr(exported, encoder, tmp_path):
    code = (
        "import sys, timm, torch, numpy\n"
        "torch.set_num_threads(1)\n"
        f"model = timm.create_model('local-dir:{exported}', pretrained=True).eval()\n"
        "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))\n"
        "from PIL import Image\n"
        f"tile = Image.fromarray(numpy.load('{tmp_path}/tile.npy'))\n"
        f"numpy.save('{tmp_path}/features.npy', model(transform(tile)[None]).detach().numpy())\n"
        "assert not any(name.startswith('its2clr') for name in sys.modules)\n"
    )
    size = json.loads((exported / "config.json").read_text())["pretrained_cfg"]["input_size"][1]
    tile = torch.randint(0, 256, (size, size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    np.save(tmp_path / "tile.npy", tile.numpy())
    subprocess.run([sys.executable, "-I", "-c", code], check=True, timeout=120)
    expected = ours(encoder, tile.permute(2, 0, 1)[None]).numpy()
    assert np.allclose(np.load(tmp_path / "features.npy"), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            EncoderConfig(options=SMALL, norm="instance", mean=(0, 0, 0), std=(1, 1, 1)),
            {"norm_layer": nn.InstanceNorm2d},
        ),
        (EncoderConfig(name="vit_small_patch16_224", options=VIT, mean=(0.48145466, 0.4578275, 0.40821073)), {}),
        (EncoderConfig(name="resnet18.a1_in1k", options=SMALL), {}),
    ],
    ids=["instance norm", "vit", "tagged"],
)
def test_other_architectures(config, told, tmp_path):
    torch.manual_seed(0)
    encoder = create_encoder(config)
    document, by_name = write_timm_folder(tmp_path, encoder, config, 64)
    assert by_name
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, **told)
    assert torch.equal(by_timm(model), ours(encoder))
    assert "hf_hub_id" not in json.dumps(document)
    if told:  # never silently another network
        with pytest.raises(RuntimeError, match="Missing key"):
            timm.create_model(f"local-dir:{tmp_path}", pretrained=True)


def test_the_card_shows_the_way_that_works(tmp_path, tiny_cohort):
    """timm takes a Swin without a classifier for an old one, so its folder cannot be loaded by name."""
    config = EncoderConfig(name="swin_tiny_patch4_window7_224", options={"img_size": 56, "embed_dim": 24})
    encoder = create_encoder(config).eval()
    folder = write_timm_folder(tmp_path, encoder, config, 56)
    assert not folder.by_name
    exported = Exported("refined", config, encoder.feature_dim, folder)
    card = model_card(exported, RunConfig(), Cohort.open(tiny_cohort), None)
    code = card.split("```python")[1].split("```")[0].replace("FOLDER", str(tmp_path))
    tile = Image.fromarray(TILES[0, :, :56, :56].permute(1, 2, 0).numpy())
    found = {"tile": tile}
    exec(code, found)
    assert torch.allclose(found["features"], ours(encoder, TILES[:1, :, :56, :56]), atol=1e-5)


def test_what_timm_cannot_rebuild_is_not_exported(tmp_path):
    encoder = create_encoder(EncoderConfig(options=SMALL))
    encoder.backbone.layer4[1].conv2 = nn.Sequential(encoder.backbone.layer4[1].conv2)
    with pytest.raises(InputError, match="timm cannot rebuild"):
        write_timm_folder(tmp_path, encoder, EncoderConfig(options=SMALL), 64)


def test_an_export_is_weights_to_start_from(exported, encoder):
    file = read_weights(exported)
    assert file.architecture == "resnet18"
    assert file.constants.mean == pytest.approx(encoder.mean.flatten().tolist())
    assert torch.equal(file.tensors["conv1.weight"], encoder.backbone.conv1.weight)


def run_onnx(path, tiles):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(["features"], {"tiles": tiles.numpy()})[0]


@pytest.mark.parametrize("count", [1, 2, 7, 33])
def test_onnx_runtime_agrees(exported, encoder, count):
    size = json.loads((exported / "config.json").read_text())["pretrained_cfg"]["input_size"][1]
    tiles = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8)
    found = run_onnx(exported / "encoder.onnx", tiles)
    assert found.shape == (count, encoder.feature_dim)
    assert np.abs(found - ours(encoder, tiles).numpy()).max() < 1e-4


def test_onnx_of_a_vit(tmp_path):
    torch.manual_seed(0)
    encoder = create_encoder(EncoderConfig(name="vit_small_patch16_224", options=VIT))
    write_onnx(tmp_path / "encoder.onnx", encoder.eval(), 64)
    for tiles in (TILES, TILES[:1]):
        assert np.abs(run_onnx(tmp_path / "encoder.onnx", tiles) - ours(encoder, tiles).numpy()).max() < 1e-4
    assert [path.name for path in tmp_path.iterdir()] == ["encoder.onnx"]


def test_without_onnx_it_says_what_to_install(evaluated_run, tmp_path, monkeypatch):
    monkeypatch.setattr("its2clr.encoder_export.network_files.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'its2clr\[onnx\]'"):
        export_encoder(evaluated_run, tmp_path / "out", formats=("timm", "onnx"))
    assert not (tmp_path / "out").exists()


def test_torchmil_reads_the_features(exported, evaluated_run, tiny_cohort):
    from torchmil.datasets import TridentWSIDataset

    cohort = Cohort.open(tiny_cohort)
    (base,) = exported.glob("*px_*px_overlap")
    first = cohort.tile_file(cohort.bags["bag_id"][0])
    dataset = TridentWSIDataset(
        base_path=f"{base}/",
        labels_path=str(tiny_cohort / "bags.csv"),
        feature_extractor="refined",
        bag_keys=["X", "Y", "adj", "coords"],
        patch_size=first.tile_size_level0,
        wsi_name_col="bag_id",
        wsi_label_col="label",
        load_at_init=False,
    )
    assert sorted(dataset.bag_names) == sorted(cohort.bags["bag_id"])
    labels = pd.read_csv(tiny_cohort / "bags.csv").set_index("bag_id")["label"]
    for name, bag in zip(dataset.bag_names, dataset, strict=True):
        run_features = read_feature_file(feature_path(evaluated_run / "features" / "refined", name))
        assert np.array_equal(bag["X"].numpy(), run_features.features)
        assert np.array_equal(bag["coords"].numpy(), cohort.tile_file(name).coords // first.tile_size_level0)
        assert bag["Y"].item() == labels[name]
        assert bag["adj"].shape == (len(run_features.features),) * 2


def test_attributes_are_tridents(exported, tiny_cohort):
    (base,) = exported.glob("*px_*px_overlap")
    cohort = Cohort.open(tiny_cohort)
    tiles = cohort.tile_file(cohort.bags["bag_id"][0])
    assert base.name == f"{10 / tiles.mpp:g}x_{tiles.tile_size}px_0px_overlap"
    for path in (base / "patches" / f"{tiles.bag_id}_patches.h5", base / "features_refined" / f"{tiles.bag_id}.h5"):
        with h5py.File(path) as file:
            told = dict(file["coords"].attrs)
            assert file["coords"].dtype == np.int64
        assert told["patch_size"] == tiles.tile_size
        assert told["patch_size_level0"] == tiles.tile_size_level0
        assert told["target_magnification"] == pytest.approx(10 / tiles.mpp)
        ratio = told["level0_magnification"] / told["target_magnification"]
        assert ratio == pytest.approx(tiles.tile_size_level0 / tiles.tile_size)
        assert told["name"] == tiles.bag_id
        assert told["overlap"] == 0


def test_tiles_without_a_scale_have_no_magnification(tmp_path):
    table = ["bag_id,path"]
    for bag in ("a b", "c/d"):
        folder = tmp_path / bag[0]
        folder.mkdir()
        for number in range(3):
            Image.fromarray(np.full((16, 16, 3), 40 * number, np.uint8)).save(folder / f"{number}.png")
        table.append(f"{bag},{folder}")
    (tmp_path / "bags.csv").write_text("\n".join(table))
    pack_images(read_manifest(tmp_path / "bags.csv", labelled=False), tmp_path / "cohort", tile_size=16, workers=1)
    cohort = Cohort.open(tmp_path / "cohort")
    base, notes = write_trident(tmp_path / "out", cohort, "start", lambda part: np.ones((part.n_instances, 4)))
    assert base.name == "16px_0px_overlap"
    assert notes == ("no magnification: the cohort does not know the scale (mpp) of all its tiles",)
    files = sorted(path.relative_to(base).as_posix() for path in base.rglob("*.h5"))
    assert files == [
        "features_start/a%20b.h5",
        "features_start/c%2Fd.h5",
        "patches/a%20b_patches.h5",
        "patches/c%2Fd_patches.h5",
    ]
    with h5py.File(base / files[0]) as file:
        assert (file["features"].shape, file["features"].dtype) == ((3, 4), np.float32)
        assert file["coords"].attrs["name"] == "a b"
        assert "target_magnification" not in file["coords"].attrs


def test_the_card_says_data_settings_and_metrics_and_no_path(exported, evaluated_run, tiny_cohort):
    card = (exported / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert head["license"] == "CC-BY-4.0"
    assert "|  | SimCLR | ItS2CLR (this one) |\n|---|---|---|\n" in card
    results = json.loads((evaluated_run / "results.json").read_text())
    for metric in ("bag", "instance"):
        cells = []
        for encoder in ("start", "refined"):
            found = results[encoder]["test"]
            low, high = found[f"{metric}_auc_interval"]
            cells.append(f"{found[f'{metric}_auc']:.3f} [{low:.3f}, {high:.3f}]")
        assert f"| {metric} AUC | {' | '.join(cells)} |" in card
    for split, part in Cohort.open(tiny_cohort).bags.groupby("split"):
        assert f"| {split} | {len(part)} | {part['label'].sum()} | {part['n_instances'].sum()} |" in card
    settings = yaml.safe_load(card.split("```yaml")[1].split("```")[0])
    assert settings["refine"]["epochs"] == 4
    assert "must not be used for" in card
    assert str(evaluated_run.parent) not in card
    assert str(tiny_cohort.parent) not in card


def test_the_code_of_the_card_runs(exported, encoder):
    card = (exported / "README.md").read_text().replace("FOLDER", str(exported))
    codes = [part.split("```")[0] for part in card.split("```python")[1:]]
    assert len(codes) == 2
    size = json.loads((exported / "config.json").read_text())["pretrained_cfg"]["input_size"][1]
    tiles = TILES[:, :, :size, :size].contiguous()
    by_timm, by_onnx = {"tile": Image.fromarray(tiles[0].permute(1, 2, 0).numpy())}, {"tiles": tiles.numpy()}
    exec(codes[0], by_timm)
    exec(codes[1], by_onnx)
    expected = ours(encoder, tiles)
    assert torch.allclose(by_timm["features"], expected[:1], atol=1e-5)
    assert np.allclose(by_onnx["features"], expected.numpy(), atol=1e-4)


def test_an_encoder_of_a_run_that_is_not_evaluated(tiny_cohort, tmp_path):
    from tests.conftest import TINY

    from its2clr.run.opening import open_run

    open_run(tmp_path / "run", tiny_cohort, "demo", [*TINY, "pretrain.epochs=0"], quiet=True).pretrain()
    export_encoder(tmp_path / "run", tmp_path / "out", "start")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Not evaluated" in card
    assert "**not stated**" in card
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    with pytest.raises(InputError, match="the refined encoder is not there yet; run `its2clr refine`"):
        export_encoder(tmp_path / "run", tmp_path / "other")
    with pytest.raises(InputError, match="no encoder named 'resnet'"):
        export_encoder(tmp_path / "run", tmp_path / "other", "resnet")
    with pytest.raises(InputError, match="give one or more of timm, onnx, features"):
        export_encoder(tmp_path / "run", tmp_path / "other", "start", ["tflite"])
    assert not (tmp_path / "other").exists()


def test_nothing_is_overwritten_and_nothing_half_done_stays(evaluated_run, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="never overwrites"):
        export_encoder(evaluated_run, tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    with pytest.raises(InputError, match="half"):
        _fail_half_way(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    (tmp_path / "empty").mkdir()
    with whole_folder(tmp_path / "empty") as folder:
        (folder / "file").write_text("whole")
    assert (tmp_path / "empty" / "file").read_text() == "whole"


def _fail_half_way(path):
    with whole_folder(path) as folder:
        (folder / "file").write_text("half")
        raise InputError("half")

"""Features made elsewhere, from the files to the maps: aggregators on them, and an adapter refined over them."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import shapely
import torch
from PIL import Image
from tests.cohort.feature_files import TILE, clam, stamp, trident
from typer.testing import CliRunner

from its2clr.cli import app
from its2clr.cohort import Cohort, CohortInfo, tile_path
from its2clr.cohort import write_bags as write_bags_table
from its2clr.cohort.layout import claim_folder
from its2clr.cohort.tiles import write_feature_tiles
from its2clr.config import EngineConfig
from its2clr.encoders.extraction import extract_features
from its2clr.encoders.weights import load_network
from its2clr.engine.checkpoint import load_checkpoint
from its2clr.engine.devices import Engine
from its2clr.engine.training_state import TrainingState
from its2clr.errors import InputError
from its2clr.maps.geojson_export import write_geojsons
from its2clr.maps.source import open_source
from its2clr.predict.model_file import load_model
from its2clr.predict.model_of_run import export_model
from its2clr.predict.new_bags import predict
from its2clr.predict.tiling import Tiling
from its2clr.run.evaluation import evaluate
from its2clr.run.names import encoder_file
from its2clr.run.opening import open_run
from its2clr.run.scores import Model
from its2clr.tile_store import TileStore
from its2clr.viewer.service import Viewer

DIM = 24
SETTINGS = {
    "aggregator.name": "max",
    "aggregator.epochs": 40,
    "aggregator.learning_rate": 0.02,
    "aggregator.bags_per_step": 8,
    "evaluation.retrainings": 2,
    "evaluation.bootstrap": 50,
    "refine.epochs": 6,
    "refine.warmup_epochs": 1,
    "refine.refresh_every": 2,
    "refine.batch_size": 64,
    "refine.aggregator_seeds": 1,
}
SET = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]


def write_bags(folder: Path, writers, count: int = 36, size: int = 5, strength: float = 3.0) -> pd.DataFrame:
    """Bags of size x size tiles; of a positive one the tiles of the first row are shifted. Gives the labels."""
    generator = np.random.default_rng(5)
    direction = generator.normal(size=DIM) / np.sqrt(DIM)
    y, x = np.mgrid[:size, :size]
    coords = np.stack([x.ravel() * TILE + 192, y.ravel() * TILE + 64], axis=1)
    rows = []
    for number in range(count):
        label, split = number % 2, ("train", "train", "val", "test")[number // 2 % 4]
        features = generator.normal(size=(size**2, DIM)).astype(np.float32)
        features[:size] += label * strength * direction * np.sqrt(DIM) / 2
        name = f"bag-{number:02d}"
        writers[number % len(writers)](folder / f"{name}.h5", features.astype(np.float32), coords)
        rows.append({"bag_id": name, "label": label, "split": split, "group": name, "mpp": 0.5})
    return pd.DataFrame(rows)


def call(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Aggregators trained in one step on files of all three programs, and evaluated."""
    folder = tmp_path_factory.mktemp("foreign")

    def clam_file(path, features, coords):
        clam(path, features, coords, patches=folder / "features" / "patches")

    table = write_bags(folder / "features", (trident, clam_file, stamp))
    table.to_csv(folder / "labels.csv", index=False)
    run = folder / "run"
    said = call("aggregate", folder / "features", "--labels", folder / "labels.csv", "--out", run, *SET)
    assert "12 of CLAM, 12 of STAMP, 12 of TRIDENT" in said
    assert "validation bag AUC" in said
    call("evaluate", run)
    return run


def test_aggregators_learn_from_them(run: Path) -> None:
    results = json.loads((run / "results.json").read_text())
    assert results["names"]["start"] == "Frozen features"
    assert results["start"]["test"]["bag_auc"] > 0.9
    scores = pd.read_parquet(run / "predictions.parquet")
    positive = scores[scores["bag_id"].isin([f"bag-{number:02d}" for number in range(1, 36, 2)])]
    first_row = positive["y"] == 64
    assert positive[first_row]["probability"].mean() > positive[~first_row]["probability"].mean() + 0.2
    # features that are read again are the files' own
    files = Cohort.open(run / "cohort").tile_file("bag-00").attributes["feature_file"]
    assert Path(str(files)).name == "bag-00.h5"


def test_geojson_and_maps_are_where_the_tiles_are(run: Path, tmp_path: Path) -> None:
    call("geojson", run, "--out", tmp_path / "geojson", "--only", "tiles")
    scores = pd.read_parquet(run / "predictions.parquet")
    files = list((tmp_path / "geojson").glob("*.geojson"))
    assert len(files) == 8
    for path in files:
        found = json.loads(path.read_text())["features"]
        corners = np.array([np.min(one["geometry"]["coordinates"][0], axis=0) for one in found])
        ends = np.array([np.max(one["geometry"]["coordinates"][0], axis=0) for one in found])
        expected = scores[scores["bag_id"] == path.stem][["x", "y"]].to_numpy()
        np.testing.assert_array_equal(corners, expected)
        np.testing.assert_array_equal(ends - corners, TILE)
        assert expected.min(axis=0).tolist() == [192, 64]
    call("map", run, "--bag", "bag-07", "--out", tmp_path / "maps", "--longest", 640)
    assert (tmp_path / "maps" / "maps.png").is_file()
    source = open_source(run)
    with pytest.raises(InputError, match="no model 'refined'"):
        source.choose_models(["refined"])
    write_geojsons(source, ["bag-07"], source.best_first, tmp_path / "regions", threshold=0.5, only="regions")
    regions = json.loads((tmp_path / "regions" / "bag-07.geojson").read_text())["features"]
    area = shapely.union_all([shapely.from_geojson(json.dumps(one["geometry"])) for one in regions])
    of_bag = scores[scores["bag_id"] == "bag-07"]
    for x, y, probability in of_bag[["x", "y", "probability"]].to_numpy():
        centre = shapely.Point(x + TILE / 2, y + TILE / 2)
        assert area.covers(centre) == (probability >= 0.5)
    assert 0 < (of_bag["probability"] >= 0.5).sum() < len(of_bag)


def test_report_viewer_and_doctor_do_without_tiles(run: Path) -> None:
    call("report", run)
    page = (run / "report.html").read_text()
    assert "24 features per tile, made elsewhere" in page
    assert "cannot be shown" not in page
    viewer = Viewer(run)
    number = viewer.table.bag_id.index("bag-07")
    image, kind = viewer.instance_image(number, 3)
    assert (kind, Image.open(io.BytesIO(image)).size) == ("jpeg", (64, 64))
    assert viewer.instance(number, 3)["x"] == 192 + 3 * TILE
    assert CliRunner().invoke(app, ["doctor", str(run / "cohort")]).exit_code == 0


def test_new_features_are_predicted(run: Path, tmp_path: Path) -> None:
    table = write_bags(tmp_path / "new", (stamp,), count=8)
    (tmp_path / "new" / "text.h5").write_text("nothing")
    call("predict", run / "model.its2clr", tmp_path / "new", "--out", tmp_path / "found", "--default-mpp", "0.5")
    found = pd.read_csv(tmp_path / "found" / "predictions.csv").set_index("bag_id")
    assert found.loc[table["bag_id"][table["label"] == 1], "probability"].mean() > 0.5
    assert "damaged" in pd.read_csv(tmp_path / "found" / "problems.csv")["problem"].item()
    instances = pd.read_parquet(tmp_path / "found" / "instances.parquet")
    assert (instances[["x", "y", "tile_size_level0"]].min() == [192, 64, TILE]).all()
    # a bag scores the same as in the run
    same = pd.read_csv(run / "bag_predictions.csv").set_index("bag_id")["probability"]
    call("predict", run, run / "cohort", "--out", tmp_path / "again")
    again = pd.read_csv(tmp_path / "again" / "predictions.csv").set_index("bag_id")["probability"]
    pd.testing.assert_series_equal(again.sort_index(), same.sort_index(), check_exact=True)


def test_features_of_another_encoder_are_noted(run: Path) -> None:
    info = Cohort.open(run / "cohort").info
    tiling = Tiling.of_cohort(info)
    assert info.settings["extractors"] == ["ctranspath"]
    assert tiling.differences(info) == []
    other = info.model_copy(update={"settings": {**info.settings, "extractors": ["uni"]}})
    assert tiling.differences(other) == ["extractors is ['uni'] there, ['ctranspath'] in the model"]
    silent = info.model_copy(update={"settings": {**info.settings, "extractors": []}})
    assert tiling.differences(silent) == []


def test_a_model_of_torchmil_beside_the_runs_own(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchmil")
    copy = shutil.copytree(run, tmp_path / "run")
    call("aggregate", "--out", copy, "--aggregator", "torchmil:ABMIL")
    call("evaluate", copy)
    results = json.loads((copy / "results.json").read_text())
    assert results["start"]["aggregators"]["torchmil:ABMIL"]["bag_auc"] > 0.8
    call("map", copy, "--bag", "bag-07", "--model", "start+torchmil:ABMIL", "--full-scale")
    model = load_model(export_model(copy, tmp_path / "abmil.its2clr", Model("start", "torchmil:ABMIL")))
    assert model.members[0].aggregators.name == "torchmil:ABMIL"
    predicted = predict(model, copy / "cohort", tmp_path / "found", quiet=True)
    wanted = pd.read_csv(copy / "bag_predictions.csv").query("aggregator == 'torchmil:ABMIL'").set_index("bag_id")
    found = predicted.bags.set_index("bag_id")["probability"]
    np.testing.assert_array_equal(found.sort_index(), wanted["probability"].sort_index())


def test_features_kept_on_disk_give_the_same(run: Path, tmp_path: Path) -> None:
    cohort = Cohort.open(run / "cohort").split("test").without_labels()
    kept = {}
    for tier in ("memory", "disk"):
        config = EngineConfig(accelerator="cpu", tiles=tier, tile_folder=str(tmp_path / "decoded"))
        engine = Engine(config)
        tiles = TileStore.from_cohort(cohort, engine)
        encoder = load_network(encoder_file(run, "start")).encoder
        kept[tier] = tiles.images, extract_features(encoder, tiles, engine)
    assert [path.suffix for path in (tmp_path / "decoded").iterdir()] == [".float32"]
    for in_memory, on_disk in zip(*kept.values(), strict=True):
        assert torch.equal(in_memory, on_disk)
    assert in_file(on_disk)
    assert not in_file(in_memory)


def in_file(tensor: torch.Tensor) -> bool:
    """Whether the values lie in a mapped file of the folder `decoded`, with or without a name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [[int(place, 16) for place in line.split()[0].split("-")] for line in lines if "/decoded/" in line]
    return any(start <= tensor.data_ptr() < end for start, end in spans)


def test_tiles_and_features_are_not_confused(run: Path, tiny_cohort: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds tiles, the model is for features made elsewhere \\(24 per tile\\)"):
        call("predict", run, tiny_cohort, "--out", tmp_path / "tiles")
    with pytest.raises(InputError, match="end to end needs the tiles"):
        open_run(tmp_path / "e2e", run / "cohort", None, SETTINGS, quiet=True).end_to_end()
    with pytest.raises(InputError, match="are for tiles; this cohort holds features"):
        open_run(tmp_path / "weights", run / "cohort", None, {**SETTINGS, "encoder.weights": "some.pth"}, quiet=True)
    with pytest.raises(InputError, match="is a cohort"):
        call("aggregate", run / "cohort", "--labels", run.parent / "labels.csv", "--out", tmp_path / "twice")


def test_a_killed_refinement_of_the_adapter_goes_on_the_same(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SETTINGS, "adapter.dropout": 0.2, "refine.momentum": 0.9, "refine.learning_rate": 0.2}
    open_run(tmp_path / "whole", run / "cohort", None, settings, quiet=True).refine()
    save = TrainingState.save

    def killed(self: TrainingState, epoch: int, *, last: bool = False) -> None:
        save(self, epoch, last=True)
        if epoch == 3:
            raise KeyboardInterrupt

    stages = open_run(tmp_path / "killed", run / "cohort", None, settings, quiet=True)
    with monkeypatch.context() as patched:
        patched.setattr(TrainingState, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            stages.refine()
    open_run(tmp_path / "killed", quiet=True).refine()
    paths = [tmp_path / name / "checkpoints" / "encoder-refined.safetensors" for name in ("whole", "killed")]
    one, other = (load_checkpoint(path)[0] for path in paths)
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_a_runs_own_features_become_a_cohort(evaluated_run: Path, tmp_path: Path) -> None:
    call("cohort", "features", tmp_path / "own", "--from-run", evaluated_run, "--encoder", "refined")
    own = Cohort.open(tmp_path / "own")
    tiles = Cohort.open(json.loads((evaluated_run / "results.json").read_text())["cohort"]["path"])
    assert own.kind == "features"
    pd.testing.assert_frame_equal(own.bags, tiles.bags)
    np.testing.assert_array_equal(own.coords(), tiles.coords())
    np.testing.assert_array_equal(own.instance_labels(), tiles.instance_labels())
    stages = open_run(tmp_path / "run", tmp_path / "own", None, SETTINGS, quiet=True)
    stages.fit()
    results = evaluate(stages)
    assert {"start", "refined", "health"} <= results.keys()
    # the start is the features as they are
    split = own.split("test").without_labels()
    held = open_run(evaluated_run, quiet=True).features("refined", tiles.split("test").without_labels())
    np.testing.assert_array_equal(stages.features("start", split).features.numpy(), held.features.numpy())


def test_an_adapter_is_no_weights_and_says_what_it_is_for(run: Path, tmp_path: Path) -> None:
    stages = open_run(tmp_path / "run", run / "cohort", None, {**SETTINGS, "refine.epochs": 2}, quiet=True)
    stages.refine()
    refined = tmp_path / "run" / "checkpoints" / "encoder-refined.safetensors"
    start = "pretrain.start=RUN/checkpoints/encoder-refined.safetensors"
    for path, kind, said in (
        (run / "model.its2clr", "model", (f"its2clr predict {run / 'model.its2clr'} FEATURES", start)),
        (refined, "checkpoint", ("its2clr predict RUN FEATURES", f"pretrain.start={refined}")),
        (refined.with_name("refine.safetensors"), "training state", ("its2clr predict RUN FEATURES", start)),
    ):
        result = CliRunner().invoke(app, ["weights", str(path)])
        assert isinstance(result.exception, InputError)
        message = str(result.exception)
        assert f"is the {kind} of an adapter over features" in message
        assert f"takes {DIM} features per tile" in message
        assert all(words in message for words in said)
        assert "encoder.name" not in message
    # the advice holds
    again = {**SETTINGS, "pretrain.start": str(refined)}
    open_run(tmp_path / "again", run / "cohort", None, again, quiet=True).pretrain()
    one, other = (
        load_checkpoint(path)[0] for path in (refined, tmp_path / "again/checkpoints/encoder-start.safetensors")
    )
    assert all(np.array_equal(one[name], other[name]) for name in one)


def make_features(folder: Path) -> Path:
    """A cohort of features with ground truth: a weak signal among strong features that mean nothing."""
    generator = np.random.default_rng(3)
    scale = np.concatenate([np.full(24, 2.0), np.ones(8)])
    info = CohortInfo(
        tile_size=32, encoding="features", kind="features", feature_dim=32, has_instance_labels=True,
        settings={"source": "features"},
    )  # fmt: skip
    claim_folder(folder, info)
    rows = []
    for number in range(120):
        label, split = number % 2, ("train", "train", "val", "test")[number // 2 % 4]
        truth = np.zeros(20, np.int8)
        truth[: 3 * label] = 1
        features = generator.normal(size=(20, 32)) * scale
        features[:, 24:] += 2.0 * truth[:, None]
        bag_id = f"bag-{number:03d}"
        coords = np.stack([np.arange(20) * 32, np.zeros(20)], axis=1)
        write_feature_tiles(
            tile_path(folder, bag_id), features, coords, [str(one) for one in range(20)], truth,
            bag_id=bag_id, tile_size=32, tile_size_level0=32, mpp=1.0, source="",
        )  # fmt: skip
        rows.append({"bag_id": bag_id, "label": label, "split": split, "group": bag_id, "n_instances": 20})
    write_bags_table(folder, pd.DataFrame(rows))
    return folder


def test_refining_the_adapter_finds_more_positives(tmp_path: Path) -> None:
    cohort = make_features(tmp_path / "cohort")
    settings = {
        "refine.epochs": 8,
        "refine.aggregator_seeds": 1,
        "evaluation.retrainings": 2,
        "evaluation.bootstrap": 20,
    }
    stages = open_run(tmp_path / "run", cohort, "features", settings, quiet=True)
    stages.fit()
    results = evaluate(stages, of_features=False)
    frozen, refined = (results[name]["aggregators"]["top_k"]["instance_auc"] for name in ("start", "refined"))
    assert refined > frozen + 0.1

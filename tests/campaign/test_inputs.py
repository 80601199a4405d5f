"""A short slice of damaged inputs per kind: each is a clear error of its own kind, or is read; never anything else."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from its2clr.cohort.features.feature_cohort import pack_features
from its2clr.cohort.features.feature_manifest import read_feature_manifest
from its2clr.cohort.features.layouts import read_header
from its2clr.cohort.features.tile_grids import FeatureProblem
from its2clr.cohort.image_files import LARGEST_IMAGE, ImageProblem, prepare_image
from its2clr.cohort.slides import shapes
from its2clr.cohort.slides.annotations import read_annotations
from its2clr.cohort.slides.masks import mask_polygons
from its2clr.cohort.tables import read_table
from its2clr.encoders.encoder import create_encoder
from its2clr.engine.checkpoint import save_checkpoint
from its2clr.errors import InputError
from its2clr.files import read_json, write_text
from its2clr.run.directory import RunDirectory
from its2clr.run.made_from import model_digest
from its2clr.run.names import aggregator_path, encoder_file
from its2clr.run.scores import RunScores
from its2clr.settings import read_recipe, resolve_config
from tests.campaign.inputs import ODD_JSON, YAML_BOMB, geojson, geojson_of_400_digits, mutations, scribble
from tests.campaign.kinds import kinds
from tests.cohort.feature_files import grid, trident

READ_AS_THEY_ARE = {".h5", ".png", ".tif", ".geojson", ".xml"}
FEATURES = np.arange(48, dtype=np.float32).reshape(12, 4)


@pytest.mark.parametrize("name", sorted(kinds()))
def test_a_damaged_file_is_read_or_refused_by_the_error_of_its_kind(name, tmp_path):
    """Files of runs and cohorts are damaged in the short campaign."""
    kind = kinds()[name]
    path = tmp_path / "files" / kind.file
    path.parent.mkdir()
    kind.make(path)
    kind.read(path)
    refused = 0
    for content in mutations(path.read_bytes(), 30, seed=1):
        path.write_bytes(content)
        try:
            kind.read(path)
        except kind.error:
            refused += 1
    assert refused > 3


def test_one_damaged_feature_file_is_a_row_and_the_rest_goes_on(tmp_path):
    """Its header is whole, so only reading its values shows the damage."""
    rows = ["bag_id,label,split"]
    for number in range(7):
        trident(tmp_path / "features" / f"b{number}.h5", FEATURES, grid(4, 3))
        rows.append(f"b{number},{number % 2},{('train', 'val', 'test')[number // 2 % 3]}")
    with h5py.File(tmp_path / "features" / "b6.h5", "w") as h5:
        h5["features"] = np.full((12, 4), b"x")
        h5["coords"] = grid(4, 3)
    (tmp_path / "bags.csv").write_text("\n".join(rows))
    summary = pack_features(read_feature_manifest(tmp_path / "bags.csv", tmp_path / "features"), tmp_path / "cohort")
    assert summary.n_bags == 6
    assert [one.bag_id for one in summary.left_out] == ["b6"]


def test_an_hdf5_file_that_declares_far_more_than_it_holds_is_not_read(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as h5:
        h5.create_dataset("features", (10**8, 1024), "f4", chunks=(1024, 1024))
        h5["coords"] = grid(4, 3)
    with pytest.raises(FeatureProblem, match="declares 381 GiB of values, but holds 0 B"):
        read_header(tmp_path / "a.h5")


def test_a_coordinate_of_400_digits_is_an_input_error(tmp_path):
    path = tmp_path / "a.geojson"
    path.write_text(geojson_of_400_digits())
    with pytest.raises(InputError, match="no list of x, y pairs"):
        read_annotations(path)


def test_annotations_that_would_take_gigabytes_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.geojson"
    path.write_text(geojson(scribble(3000, seed=0)))
    with pytest.raises(InputError, match="crosses itself more than 50000 times"):
        read_annotations(path)
    noise = np.random.default_rng(0).random((1500, 1500)) < 0.5
    with pytest.raises(InputError, match="it is noise, not regions"):
        mask_polygons(noise)
    monkeypatch.setattr(shapes, "_PAIRS_AT_ONCE", 1)
    star = shapes.shapely.Polygon([(0, 0), (10, 10), (10, 0), (0, 10)])  # a bow tie
    assert shapes._crossings(star) == 1


def test_an_image_is_refused_by_the_size_it_declares(tmp_path):
    side = int(LARGEST_IMAGE**0.5) + 1
    Image.new("1", (side, side)).save(tmp_path / "a.png")
    with pytest.raises(ImageProblem, match="too many for one tile"):
        prepare_image(tmp_path / "a.png", tile_size=32, encoding="png")


@pytest.mark.parametrize("content", ODD_JSON)
def test_odd_json_of_a_run_is_an_input_error(content, tmp_path):
    path = tmp_path / "state.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    run = RunDirectory.__new__(RunDirectory)
    run.path = tmp_path
    with pytest.raises(InputError, match=r"state\.json"):
        run.finished()


def test_damaged_tables_of_a_run_are_an_input_error(tmp_path):
    scores = RunScores.__new__(RunScores)
    scores.run = tmp_path
    for content in (b"", b"\xff\xfe\0", b"bag_id,label\na,1\n", b"\0\0"):
        (tmp_path / "bag_predictions.csv").write_bytes(content)
        with pytest.raises(InputError, match=r"bag_predictions\.csv"):
            _ = scores.bags
    folder = tmp_path / "rounds" / "0003"
    folder.mkdir(parents=True)
    (folder / "pseudo_labels.parquet").write_bytes(b"PAR1 cut short")
    with pytest.raises(InputError, match=r"pseudo_labels\.parquet: is damaged"):
        scores.round(3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (YAML_BOMB, "repeat themselves"),
        ("refine: &a [*a]", "repeat themselves"),
        ("[" * 5000, "not valid YAML"),
        ("when: 2020-99-99", "not valid YAML"),
    ],
)
def test_an_odd_recipe_is_an_input_error(text, said, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(InputError, match=said):
        read_recipe(tmp_path / "a.yaml")


@pytest.mark.parametrize("options", [{"layers": 3}, {"layers": [1]}, {"block": "x"}, {"no": 1}, {"in_chans": "three"}])
def test_odd_options_of_the_encoder_are_an_input_error(options):
    with pytest.raises(InputError, match="with options"):
        create_encoder("resnet18", **options)


def test_a_nul_in_a_table_is_said_with_its_row(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"bag_id,label\na,1\nb\0,0\n")
    problems = []
    assert read_table(tmp_path / "a.csv", problems) is None
    assert "NUL character in row 3" in str(problems[0])


def test_a_name_that_is_not_utf8_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="rename that file"):
        write_text(tmp_path / "a.txt", "slide\udcff.tif")
    assert not (tmp_path / "a.txt").exists()


@pytest.mark.parametrize("name", [name for name, kind in kinds().items() if Path(kind.file).suffix in READ_AS_THEY_ARE])
def test_a_path_too_long_for_any_file_is_not_there(name, tmp_path):
    kind = kinds()[name]
    with pytest.raises(kind.error, match=r"exist|no such"):
        kind.read(tmp_path / ("a" * 300 + Path(kind.file).suffix))


def test_json_is_read_as_it_was_written(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"a": 1}))
    assert read_json(tmp_path / "a.json") == {"a": 1}
    with pytest.raises(InputError, match="holds a dict instead of a list"):
        read_json(tmp_path / "a.json", list)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none.json")


def test_damaged_weights_of_a_run_are_an_input_error(tmp_path):
    """Found by a campaign: `evaluate` hashes them before it reads them."""
    config = resolve_config("demo", [])
    for path in (encoder_file(tmp_path, "start"), aggregator_path(tmp_path, "start", None)):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_checkpoint(path, {"w": torch.arange(8.0)}, {})
    assert model_digest(tmp_path, config, "start", config.aggregator.name)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(InputError, match=r"start\.safetensors: not a safetensors file, or incomplete"):
        model_digest(tmp_path, config, "start", config.aggregator.name)

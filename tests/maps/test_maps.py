import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import shapely
import tifffile
from PIL import Image
from tests.maps.aligned import CUTTINGS, SHAPES, Cutting, cut, iou, scaled
from typer.testing import CliRunner

from its2clr.cli import app
from its2clr.cohort import Cohort
from its2clr.errors import InputError
from its2clr.maps.bag_panels import draw_bag, fill, panel_size, thumbnail
from its2clr.maps.geojson_export import write_geojsons
from its2clr.maps.overlay import write_overlays
from its2clr.maps.sheets import lay_out, write_maps
from its2clr.maps.source import bag_file, models_beside, open_source

NAMES = ["<script>alert(1)</script>", "../../up", "/etc/x", "a\"b'c", "naïve ☃ 标本", "..", "maps", "a b%2F"]


def coloured(image):
    """The pixels of a map that are not the grey of the slide."""
    pixels = np.asarray(image, dtype=int)
    return pixels.max(axis=2) - pixels.min(axis=2) > 12


def place_in(sheet, panel):
    """Where a panel is in a sheet, pixel by pixel; None if it is not."""
    rows, first = np.asarray(sheet), np.asarray(panel)[0].tobytes()
    for top in range(rows.shape[0] - panel.height + 1):
        left = rows[top].tobytes().find(first) // 3
        if left >= 0:
            part = rows[top : top + panel.height, left : left + panel.width]
            return (left, top) if np.array_equal(part, np.asarray(panel)) else None
    return None


def test_panels_lie_on_the_shapes_and_go_into_the_picture_unchanged(cut_slide, tmp_path):
    row = draw_bag(cut_slide, "bag", cut_slide.models, 0.5, 640)
    image, truth, model = row.panels
    assert [panel.title for panel in row.panels] == ["Image", "Ground truth", "ItS2CLR"]
    assert image.image.size == truth.image.size == model.image.size
    assert model.caption == "bag probability 0.93"
    assert truth.caption == "annotation"
    scale = np.array(model.image.size) / np.array([1187, 929])
    shapes = fill(scaled(SHAPES, *scale), model.image.size)
    assert iou(coloured(model.image), shapes) >= 0.95
    assert iou(np.asarray(image.image)[..., 1] < 100, shapes) >= 0.95  # the slide itself is purple there
    write_maps(cut_slide, ["bag"], cut_slide.models, tmp_path, threshold=0.5, longest=640)
    written = Image.open(tmp_path / "bags" / "bag.png")
    assert written.size == lay_out([row]).size
    assert place_in(written, model.image) is not None


def test_a_scale_bar_has_the_length_it_says(tmp_path):
    source = cut(tmp_path, CUTTINGS[2], SHAPES)
    row = draw_bag(source, "bag", source.models, 0.5, 594)  # half of the slide: 1 um per pixel
    sheet = np.asarray(lay_out([row]).convert("L"))
    left, top = place_in(lay_out([row]), row.panels[1].image)
    first = sheet[top : top + 465, left - 594 - 22 : left - 22]
    lengths = [
        len(max("".join("x" if dark else " " for dark in line < 10).split(), key=len, default="")) for line in first
    ]
    assert max(lengths) == 100


def test_ground_truth_without_its_annotation_is_the_tiles(tmp_path):
    area = shapely.box(200, 100, 600, 500)
    source = cut(tmp_path, Cutting(0.25, 0.5, 10, 0), area, min_covered=1.0)
    (tmp_path / "area.geojson").unlink()
    panels = {panel.title: panel for panel in draw_bag(source, "bag", source.models, 0.5, 2000).panels}
    assert panels["Ground truth"].caption == "positive tiles"
    pale = np.asarray(panels["Ground truth"].image)[..., 1] > 170
    assert iou(~pale[110:490, 210:590], np.ones((380, 380), bool)) == 1
    assert pale[:90].all()
    assert pale[:, :190].all()
    unknown = replace(source.best, bag=lambda _: replace(source.best.bag("bag"), truth=None))
    titles = [panel.title for panel in draw_bag(source, "bag", [unknown], 0.5, 400).panels]
    assert titles == ["Image", "ItS2CLR"]


def test_fill_is_every_pixel_whose_centre_is_inside():
    area = SHAPES.union(shapely.box(-50, 900, 80.5, 1000))
    x, y = np.meshgrid(np.arange(1187) + 0.5, np.arange(929) + 0.5)
    np.testing.assert_array_equal(fill(area, (1187, 929)), shapely.contains_xy(area, x, y))


def test_a_large_slide_is_read_in_parts(tmp_path, monkeypatch):
    from its2clr.cohort.canvas import open_canvas

    source = cut(tmp_path, CUTTINGS[2], SHAPES)
    with open_canvas(source.places["bag"].tiles()) as canvas:
        out = panel_size(canvas.size, 300)
        whole = np.asarray(thumbnail(canvas, out), dtype=int)
        monkeypatch.setattr("its2clr.maps.bag_panels._BLOCK_PIXELS", 50_000)
        parts = np.asarray(thumbnail(canvas, out), dtype=int)
    assert out == (300, 235)
    assert (np.abs(whole - parts).max(axis=2) > 40).mean() < 0.02  # edges between parts fall on whole pixels


def test_panels_are_as_long_as_asked_and_small_bags_sharp():
    assert panel_size((100_000, 50_000), 1600) == (1600, 800)
    assert panel_size((192, 96), 1600) == (576, 288)
    assert panel_size((192, 96), 200) == (192, 96)
    assert panel_size((100_000, 10), 1600) == (1600, 1)


@pytest.fixture
def strange(tmp_path):
    """The same slide under names that mean something to shells, browsers and file systems."""
    source = cut(tmp_path / "in", Cutting(0.5, 0.5, 60, 0), SHAPES)
    model = replace(source.best, bag=lambda bag_id: replace(source.best.bag("bag"), bag_id=bag_id))
    places = dict.fromkeys(NAMES, source.places["bag"])
    return replace(source, models=(model,), usual=(model,), best=model, places=places)


def test_names_of_bags_do_not_leave_the_folder(strange, tmp_path):
    out = tmp_path / "out" / "deep" / "er"
    write_maps(strange, NAMES, strange.models, out / "maps", threshold=0.2, longest=100)
    write_overlays(strange, NAMES, strange.models, out / "maps", threshold=0.2)
    write_geojsons(strange, NAMES, strange.models, out / "geojson", threshold=0.5)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert all(path.is_relative_to(out) for path in files)
    assert len(files) == 4 * len(NAMES) + 1
    for name in NAMES:
        assert bag_file(out / "geojson", name, ".geojson") in files
        with tifffile.TiffFile(bag_file(out / "maps/overlays/refined/colour", name, ".ome.tiff")) as file:
            assert file.is_ome
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_run_is_shown_with_all_its_models(evaluated_run, tmp_path):
    source = open_source(evaluated_run)
    assert [(model.name, model.title) for model in source.models] == [("start", "SimCLR"), ("refined", "ItS2CLR")]
    assert source.best.name == "refined"
    test = Cohort.open(source.places["slide_040"].cohort.path).split("test").bags
    chosen = source.choose_bags(None)
    assert sorted(chosen) == sorted(test["bag_id"])
    assert [source.places[bag_id].label for bag_id in chosen] == [1] * 8 + [0] * 8
    assert source.choose_bags(None, "val", 3) == source.choose_bags(None, "val")[:3]
    sheet = write_maps(source, chosen[:2], source.usual, tmp_path, threshold=0.2)
    assert Image.open(sheet).height > Image.open(tmp_path / "bags" / f"{chosen[0]}.png").height // 2
    other = tmp_path / "ablation"
    shutil.copytree(evaluated_run, other, ignore=shutil.ignore_patterns("checkpoints", "rounds"))
    shown = models_beside(source, source.usual, [other])
    assert [model.title for model in shown] == ["SimCLR", "ItS2CLR", "ItS2CLR (ablation)"]
    assert [panel.title for panel in draw_bag(source, chosen[0], shown, 0.2, 100).panels][2:] == [
        model.title for model in shown
    ]


def test_what_is_not_there_is_said(evaluated_run, tmp_path):
    source = open_source(evaluated_run)
    with pytest.raises(InputError, match="no predictions for bag 'x'"):
        source.choose_bags(["x"])
    with pytest.raises(InputError, match="unknown split 'tests'"):
        source.choose_bags(None, "tests")
    with pytest.raises(InputError, match="no model 'max'; there are start, refined"):
        source.choose_models(["max"])
    with pytest.raises(InputError, match="threshold is a probability"):
        write_maps(source, ["slide_040"], source.usual, tmp_path, threshold=2)
    with pytest.raises(InputError, match="from 32 to"):
        write_maps(source, ["slide_040"], source.usual, tmp_path, threshold=0.2, longest=1)
    with pytest.raises(InputError, match="not a run"):
        open_source(tmp_path)


def predicted_folder(run: Path, folder: Path, names: dict[str, str] | None = None):
    """What `its2clr predict` leaves, made of a run's own predictions."""
    source = open_source(run)
    bag_ids = list(names.values()) if names else source.choose_bags(None, "test", 3)
    called = {bag_id: name for name, bag_id in (names or {}).items()}
    folder.mkdir()
    bags, instances = [], []
    for bag_id in bag_ids:
        scores = source.best.bag(bag_id)
        name = called.get(bag_id, bag_id)
        bags.append({"bag_id": name, "probability": scores.probability})
        instances.append(
            pd.DataFrame(scores.coords, columns=["x", "y"]).assign(
                bag_id=name, instance=np.arange(len(scores.coords)), probability=scores.instances
            )
        )
    pd.DataFrame(bags).to_csv(folder / "predictions.csv", index=False)
    pd.concat(instances)[::-1].to_parquet(folder / "instances.parquet", index=False)
    return source, bag_ids


def test_predictions_of_new_bags_are_shown_the_same_way(evaluated_run, tiny_cohort, tmp_path):
    source, bag_ids = predicted_folder(evaluated_run, tmp_path / "new")
    shutil.copytree(tiny_cohort, tmp_path / "new" / "cohort")
    predicted = open_source(tmp_path / "new")
    chosen = predicted.choose_bags(None)
    assert sorted(chosen) == sorted(bag_ids)
    likely = [predicted.best.bag(bag_id).probability for bag_id in chosen]
    assert likely == sorted(likely, reverse=True)
    for bag_id in bag_ids:
        found, expected = predicted.best.bag(bag_id), source.best.bag(bag_id)
        np.testing.assert_array_equal(found.instances, expected.instances)
        np.testing.assert_array_equal(found.coords, expected.coords)
        assert found.probability == pytest.approx(expected.probability)
    write_maps(predicted, bag_ids, predicted.usual, tmp_path / "maps", threshold=0.2, longest=100)
    write_geojsons(predicted, bag_ids, predicted.best_first, tmp_path / "geojson", threshold=0.5)
    assert len(list((tmp_path / "geojson").glob("*.geojson"))) == 3


def test_predicted_bags_may_lie_in_other_cohorts_under_other_names(evaluated_run, tiny_cohort, tmp_path):
    source, (bag_id,) = predicted_folder(evaluated_run, tmp_path / "new", {"site-a/case 1": "slide_041"})
    cohorts = [{"path": str(tiny_cohort), "bags": {"site-a/case 1": "slide_041"}}]
    known = {"cohorts": cohorts, "threshold": 0.4}
    (tmp_path / "new" / "prediction.json").write_text(json.dumps({**known, "model": {"method": "ItS2CLR"}}))
    predicted = open_source(tmp_path / "new")
    np.testing.assert_array_equal(predicted.best.bag("site-a/case 1").instances, source.best.bag(bag_id).instances)
    cohorts[0]["bags"]["site-a/case 1"] = "slide_999"
    (tmp_path / "new" / "prediction.json").write_text(json.dumps(known))
    with pytest.raises(InputError, match="slide_999"):
        open_source(tmp_path / "new")
    (tmp_path / "new" / "prediction.json").write_text(json.dumps({**known, "cohorts": []}))
    with pytest.raises(InputError, match="run `its2clr predict` again"):
        open_source(tmp_path / "new")


def run_command(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_commands_leave_their_files(evaluated_run, tmp_path):
    out = tmp_path / "maps"
    bag = ["--bag", "slide_040"]
    said = run_command("map", evaluated_run, *bag, "--full-scale", "--model", "refined", "--out", out)
    assert said.exit_code == 0, said.exception
    assert str(out / "maps.png") in said.stdout
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*.*")) == [
        "bags/slide_040.png",
        "maps.png",
        "overlays/refined/colour/slide_040.ome.tiff",
        "overlays/refined/probability/slide_040.ome.tiff",
    ]
    assert "2 files" in run_command("geojson", evaluated_run, "--limit", "2", "--out", tmp_path / "geojson").stdout
    document = json.loads(next((tmp_path / "geojson").iterdir()).read_text())
    tile = document["features"][-1]["properties"]
    assert list(tile["measurements"]) == ["refined probability", "start probability"]
    failed = run_command("map", evaluated_run, "--bag", "nobody")
    assert "no predictions for bag 'nobody'" in str(failed.exception)


def test_a_negative_bag_has_no_ground_truth_to_outline(evaluated_run):
    source = open_source(evaluated_run)
    negative = source.choose_bags(None)[-1]
    row = draw_bag(source, negative, source.usual, 0.2, 100)
    assert row.panels[0].caption.endswith("(negative)")
    assert row.panels[1].caption == "nothing positive"

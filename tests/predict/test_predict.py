"""From a trained model to new bags; the runs are tiny, the slides small, all the rest is real."""

import json
import os
import shutil
import signal
import subprocess
import sys

import h5py
import numpy as np
import pandas as pd
import pytest
from PIL import Image
from tests.cohort.slide_files import draw, write_pyramid
from tests.cohort.ultrasound_images import draw as draw_ultrasound
from tests.cohort.ultrasound_images import fan, frame, rectangle
from tests.conftest import TINY
from tests.end_to_end.commands import ROOT

from its2clr.cli import main
from its2clr.cohort import Cohort, read_tiles, tile_path
from its2clr.cohort import cohort as cohort_module
from its2clr.cohort import tiles as tiles_module
from its2clr.cohort.canvas import open_canvas
from its2clr.cohort.layout import write_bags
from its2clr.cohort.slides import SlideSettings, pack_slides, read_slide_manifest
from its2clr.errors import InputError
from its2clr.maps.source import open_source
from its2clr.predict import inference as scoring
from its2clr.predict.model_file import join_model, load_model, save_model
from its2clr.predict.model_of_run import export_model
from its2clr.predict.new_bags import predict
from its2clr.predict.prediction_folder import read_predictions
from its2clr.predict.tiling import Tiling
from its2clr.run.evaluation import evaluate
from its2clr.run.opening import open_run

HOSTILE = ['Ümlaut, "quoted"; a', "<script>alert(1)<script>", "=1+1", " spaces  inside", "日本語" * 20, "100%25"]


def read_bags(folder):
    return pd.read_csv(
        folder / "predictions.csv", converters=dict.fromkeys(["probability"], float), dtype={"bag_id": str}
    )


def read_problems(folder):
    return pd.read_csv(folder / "problems.csv", dtype=str, keep_default_na=False)


def expected(run, encoder="refined"):
    bags = pd.read_csv(run / "bag_predictions.csv", converters={"probability": float})
    instances = pd.read_parquet(run / "predictions.parquet")
    return bags[bags["encoder"] == encoder], instances[instances["encoder"] == encoder]


@pytest.fixture(scope="module")
def model_file(evaluated_run, tmp_path_factory):
    return export_model(evaluated_run, tmp_path_factory.mktemp("model") / "model.its2clr")


def with_tiling(model_file, tiling, path):
    """The same weights, as if they had been trained on other bags."""
    model = load_model(model_file)
    other = join_model(model.description.model_copy(update={"tiling": tiling}), *model.members)
    return save_model(other, path)


@pytest.fixture(scope="module")
def image_model(model_file, tmp_path_factory):
    """The same weights, as if they had been trained on folders of images."""
    tiling = Tiling(
        kind="images", tile_size=32, mpp=None, settings={"tile_size": 32, "encoding": "png", "resize": "bilinear"}
    )
    return with_tiling(model_file, tiling, tmp_path_factory.mktemp("model") / "images.its2clr")


@pytest.fixture
def its2clr(monkeypatch, capsys):
    """The command line in this process: arguments to exit code and what was said."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["its2clr", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code, capsys.readouterr().err

    return run


@pytest.fixture(scope="module")
def slide_run(tmp_path_factory):
    """A run that was trained on slides, tiled at half their resolution and stored as JPEG."""
    folder = tmp_path_factory.mktemp("slides")
    rows = ["bag_id,file,label,split"]
    for number, split in enumerate(["train"] * 4 + ["val"] * 4 + ["test"] * 2):
        write_pyramid(folder / f"{number}.tiff", draw(400, 300, seed=number, blobs=6))
        rows.append(f"slide-{number},{number}.tiff,{number % 2},{split}")
    (folder / "slides.csv").write_text("\n".join(rows))
    settings = SlideSettings(mpp=1.0, tile_size=32, overlap=8, min_saturation=20.0)
    pack_slides(read_slide_manifest(folder / "slides.csv"), folder / "cohort", settings, workers=1)
    stages = open_run(folder / "run", folder / "cohort", "demo", TINY, quiet=True)
    stages.fit()
    evaluate(stages, of_features=False)
    export_model(folder / "run")
    return folder


def test_the_runs_own_cohort_gives_the_runs_numbers(model_file, evaluated_run, tiny_cohort, tmp_path, monkeypatch):
    predicted = predict(model_file, tiny_cohort, tmp_path / "out", quiet=True)
    bags, instances = expected(evaluated_run)
    found = read_bags(tmp_path / "out")
    assert found.columns.tolist() == [
        "bag_id", "source", "n_instances", "probability", "calibrated_probability", "predicted_label",
    ]  # fmt: skip
    assert found["bag_id"].tolist() == bags["bag_id"].tolist()
    assert found["probability"].tolist() == bags["probability"].tolist()  # bit for bit, though splits were apart there
    written = pd.read_parquet(tmp_path / "out" / "instances.parquet")
    assert written.columns.tolist() == ["bag_id", "instance", "name", "x", "y", "probability", "tile_size_level0"]
    shared = ["bag_id", "instance", "name", "x", "y", "probability"]
    pd.testing.assert_frame_equal(
        written[shared], instances[shared].reset_index(drop=True), check_exact=True, check_dtype=False
    )
    assert (written["tile_size_level0"] == 32).all()
    model = load_model(model_file)
    np.testing.assert_allclose(
        found["calibrated_probability"].astype(float), model.calibration.apply(found["probability"]), rtol=1e-12
    )
    assert (
        found["predicted_label"].tolist() == (found["probability"] >= model.description.threshold).astype(int).tolist()
    )
    assert (read_problems(tmp_path / "out")).empty
    pd.testing.assert_frame_equal(predicted.instances, written, check_dtype=False)
    first = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    monkeypatch.setattr(scoring, "GROUP_BYTES", 3 * 32 * 32 * 100)
    assert len(scoring.bag_groups(Cohort.open(tiny_cohort), scoring.GROUP_BYTES)) == 10
    predict(model_file, tiny_cohort, tmp_path / "out", quiet=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == first


def test_labels_are_not_read(model_file, tiny_cohort, tmp_path, monkeypatch):
    other = tmp_path / "cohort"
    shutil.copytree(tiny_cohort, other)
    bags = pd.read_csv(other / "bags.csv", dtype=str)
    bags["label"] = [str(1 - int(label)) for label in bags["label"]]
    bags.to_csv(other / "bags.csv", index=False)
    for path in (other / "tiles").iterdir():
        with h5py.File(path, "r+") as file:
            file["labels"][:] = 1 - file["labels"][:]

    def refuse(_path):
        raise AssertionError("instance labels were read")

    monkeypatch.setattr(cohort_module, "read_labels", refuse)
    monkeypatch.setattr(tiles_module, "read_labels", refuse)
    for name, cohort in (("a", tiny_cohort), ("b", other)):
        predict(model_file, cohort, tmp_path / name, quiet=True)
    for name in ("predictions.csv", "instances.parquet"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_model_file_and_slide_are_enough(slide_run, tmp_path):
    bags, instances = expected(slide_run / "run")
    clean = tmp_path / "clean"
    (clean / "home").mkdir(parents=True)
    shutil.copy(slide_run / "run" / "model.its2clr", clean)
    slide = shutil.copy(slide_run / "8.tiff", clean / "new case.tiff")
    away = slide_run.with_name("away")
    slide_run.rename(away)
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(clean / "home"), "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TERM": "dumb",
    }  # fmt: skip
    words = ["predict", "model.its2clr", slide.name, "--out", "out", "--workers", "1"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "its2clr", *words],
            cwd=clean, env=environment, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
    finally:
        away.rename(slide_run)
    assert done.returncode == 0, done.stderr
    assert "1 bags" in done.stdout
    found = read_bags(clean / "out")
    assert found["bag_id"].tolist() == ["new case"]
    assert found["source"].tolist() == [str(slide)]
    assert found["probability"].tolist() == bags.query("bag_id == 'slide-8'")["probability"].tolist()
    own = instances.query("bag_id == 'slide-8'")
    written = pd.read_parquet(clean / "out" / "instances.parquet")
    assert len(written) == len(own) > 5
    for column in ("name", "x", "y", "probability"):
        assert written[column].tolist() == own[column].tolist()
    assert (written["tile_size_level0"] == 64).all()
    assert Cohort.open(clean / "out" / "cohort").is_labelled is False


def test_slides_that_cannot_be_used_are_said_and_the_rest_goes_on(slide_run, tmp_path):
    new = tmp_path / "new"
    for folder in ("site-a", "site-b", ".hidden"):
        (new / folder).mkdir(parents=True)
    good = slide_run / "9.tiff"
    for place in ("site-a/twin", "site-b/twin", ".hidden/x", *HOSTILE[:2]):
        shutil.copy(good, new / f"{place}.tiff")
    write_pyramid(new / "no scale.tiff", draw(200, 150), mpp=None)
    write_pyramid(new / "blank.tiff", np.full((150, 200, 3), 243, np.uint8))
    write_pyramid(new / "coarse.tiff", draw(200, 150), mpp=4.0)
    (new / "empty.svs").write_bytes(b"")
    (new / "text.ndpi").write_text("no slide at all")
    (new / "notes.txt").write_text("not even tried")
    (tmp_path / "nothing").mkdir()
    (new / "site-a" / "loop").symlink_to(new)
    inputs = [new, new / "site-a" / "twin.tiff", tmp_path / "nothing"]
    predicted = predict(slide_run / "run", inputs, tmp_path / "out", workers=1, quiet=True)
    bags = read_bags(tmp_path / "out")
    assert set(bags["bag_id"]) == {"site-a/twin", "site-b/twin", *HOSTILE[:2]}
    truth, _ = expected(slide_run / "run")
    assert set(bags["probability"]) == set(truth.query("bag_id == 'slide-9'")["probability"])
    problems = read_problems(tmp_path / "out")
    reasons = {row.file.rpartition("/")[2]: row.problem for row in problems.itertuples()}
    assert "the scale is unknown" in reasons["no scale.tiff"]
    assert "--default-mpp" in reasons["no scale.tiff"]
    assert "no tissue" in reasons["blank.tiff"]
    assert "too coarse" in reasons["coarse.tiff"]
    assert "empty" in reasons["empty.svs"]
    assert "no slide in this folder" in reasons["nothing"]
    assert reasons.keys() == {"no scale.tiff", "blank.tiff", "coarse.tiff", "empty.svs", "text.ndpi", "nothing"}
    said = "\n".join(predicted.lines())
    assert "4 bags" in said
    assert "left out: 6" in said
    # The same again: the same bytes, and no slide is tiled twice.
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "cohort" / "tiles").iterdir()}
    assert len(stamps) == 4
    predict(slide_run / "run", reversed(inputs[:2]), tmp_path / "other", workers=1, quiet=True)
    for path in inputs[0].glob("*"):
        if path.name in reasons:
            path.unlink()
    predict(slide_run / "run", inputs[:2], tmp_path / "out", workers=1, quiet=True)
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    again = {path: path.read_bytes() for path in before}
    changed = {path.name for path in before if again[path] != before[path]}
    assert changed == {"problems.csv"}
    write_pyramid(new / "no scale.tiff", draw(400, 300, seed=9, blobs=6), mpp=None)
    rescued = predict(slide_run / "run", new, tmp_path / "out", default_mpp=0.5, workers=1, quiet=True)
    assert rescued.bags.set_index("bag_id")["probability"]["no scale"] == bags["probability"][0]
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert set(read_bags(tmp_path / "other")["bag_id"]) == set(bags["bag_id"])


def test_a_manifest_gives_names_and_scales_and_its_labels_are_not_looked_at(slide_run, tmp_path):
    write_pyramid(tmp_path / "s.tiff", draw(400, 300, seed=9, blobs=6), mpp=None)
    (tmp_path / "new.csv").write_text("bag_id,file,mpp,label,annotation\nmine,s.tiff,0.5,maybe,absent.xml\n")
    predicted = predict(slide_run / "run", tmp_path / "new.csv", tmp_path / "out", workers=1, quiet=True)
    truth, _ = expected(slide_run / "run")
    assert predicted.bags["bag_id"].tolist() == ["mine"]
    assert predicted.bags["probability"].tolist() == truth.query("bag_id == 'slide-9'")["probability"].tolist()


def test_a_drawn_slide_as_a_file_gives_the_numbers_of_the_embedded_cohort(
    model_file, evaluated_run, tiny_cohort, tmp_path
):
    tiles = Cohort.open(tiny_cohort).tile_file("slide_003")
    with open_canvas(tiles) as canvas:
        pixels = np.asarray(canvas.read(0, 0, *canvas.size, canvas.size))
    write_pyramid(tmp_path / "slide_003.tiff", pixels, levels=2, mpp=1.0)
    predict(model_file, tmp_path / "slide_003.tiff", tmp_path / "out", workers=1, quiet=True)
    bags, instances = expected(evaluated_run)
    assert read_bags(tmp_path / "out")["probability"][0] == bags.set_index("bag_id")["probability"]["slide_003"]
    written = pd.read_parquet(tmp_path / "out" / "instances.parquet")
    own = instances[instances["bag_id"] == "slide_003"]
    assert written[["x", "y", "probability"]].to_numpy().tolist() == own[["x", "y", "probability"]].to_numpy().tolist()


def picture(path, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 36, 3), dtype=np.uint8)).save(path)


def test_folders_of_images_are_bags(image_model, tmp_path):
    for number in range(3):
        picture(tmp_path / "alone" / f"{number}.png", number)
        for exam in (*HOSTILE[:1], *HOSTILE[2:], "alone"):
            picture(tmp_path / "exams" / exam / f"{number}.png", number)
    (tmp_path / "exams" / "alone" / "broken.png").write_bytes(b"no image")
    (tmp_path / "exams" / "empty").mkdir()
    (tmp_path / "nothing").mkdir()
    picture(tmp_path / "single.png", 0)
    inputs = [tmp_path / name for name in ("alone", "exams", "nothing", "single.png")]
    predict(image_model, inputs, tmp_path / "out", quiet=True)
    bags = read_bags(tmp_path / "out")
    names = bags["bag_id"].tolist()
    assert len(set(names)) == len(names) == 7
    assert {"exams/alone", HOSTILE[0], "=1+1", "spaces  inside", "100%25"} < set(names)
    assert f"{tmp_path.name}/alone" in names
    assert any(name.startswith("日本語") and len(name) < 60 for name in names)
    assert bags["n_instances"].tolist() == [3] * 7
    assert len(set(bags["probability"])) == 1  # the same three images in all of them
    problems = read_problems(tmp_path / "out")
    said = {row.file.rpartition("/")[2]: row.problem for row in problems.itertuples()}
    assert said.keys() == {"broken.png", "empty", "nothing", "single.png"}
    assert "put the images of a bag into a folder" in said["single.png"]
    cohort = Cohort.open(tmp_path / "out" / "cohort")
    (made,) = json.loads((tmp_path / "out" / "prediction.json").read_text())["cohorts"]
    assert list(made["bags"]) == names
    assert list(made["bags"].values()) == cohort.bags["bag_id"].tolist()
    (tmp_path / "new.csv").write_text("bag_id;path\nfirst;alone\n", encoding="utf-8")
    again = predict(image_model, tmp_path / "new.csv", tmp_path / "manifest", quiet=True)
    assert again.bags[["bag_id", "probability"]].to_numpy().tolist() == [["first", bags["probability"][0]]]


def test_ultrasound_images_are_cropped_as_in_training(model_file, tmp_path, its2clr):
    (tmp_path / "exam").mkdir()
    for view, scan in enumerate([fan(240, -20, 60, 360, 60), rectangle(110, 30, 400, 330)]):
        draw_ultrasound(scan, view).save(tmp_path / "exam" / f"{view}.png")
    (tmp_path / "exams.csv").write_text("bag_id,path\nold,exam\n")
    command = ["cohort", "images", tmp_path / "exams.csv", tmp_path / "old", "--unlabelled", "--tile-size", 32]
    assert its2clr(*command, "--crop", "ultrasound")[0] == 0
    code, said = its2clr(*command)
    assert code == 2
    assert "crop: ultrasound there, not set asked for" in said
    trained = Cohort.open(tmp_path / "old")
    model = with_tiling(model_file, Tiling.of_cohort(trained.info), tmp_path / "model.its2clr")

    frame().save(tmp_path / "exam" / "page.png")
    predict(model, tmp_path / "exam", tmp_path / "out", quiet=True)
    new = Cohort.open(tmp_path / "out" / "cohort")
    assert new.info.settings["crop"] == "ultrasound"
    before, now = read_tiles(tile_path(tmp_path / "old", "old")), read_tiles(tile_path(new.path, "exam"))
    assert now.names == before.names == ["0.png", "1.png"]
    assert [now.encoded(view) for view in range(2)] == [before.encoded(view) for view in range(2)]
    assert read_problems(tmp_path / "out")["problem"].str.contains("no ultrasound scan was found").tolist() == [True]


def test_bags_of_one_name_in_two_cohorts_are_told_apart(model_file, tiny_cohort, tmp_path):
    for site in ("north", "south"):
        shutil.copytree(tiny_cohort, tmp_path / site / "cohort")
    predicted = predict(
        model_file, [tmp_path / "north/cohort", tmp_path / "south/cohort"], tmp_path / "out", quiet=True
    )
    names = predicted.bags["bag_id"].tolist()
    assert len(set(names)) == len(names) == 112
    assert {"north/cohort/slide_000", "south/cohort/slide_000"} < set(names)


def altered(cohort, folder, mpp=None, **info):
    shutil.copytree(cohort, folder)
    described = json.loads((folder / "cohort.json").read_text())
    (folder / "cohort.json").write_text(json.dumps({**described, **info}))
    for path in sorted((folder / "tiles").iterdir())[:3]:
        if mpp is not None:
            with h5py.File(path, "r+") as file:
                file.attrs["mpp"] = mpp
    return folder


def test_what_does_not_fit_the_model_is_refused(model_file, image_model, slide_run, tiny_cohort, tmp_path):
    scaled = altered(tiny_cohort, tmp_path / "scaled", mpp=0.5)
    predicted = predict(model_file, scaled, tmp_path / "out", quiet=True)
    assert len(predicted.bags) == 53
    problems = read_problems(tmp_path / "out")
    assert problems["bag_id"].tolist() == ["slide_000", "slide_001", "slide_002"]
    assert set(problems["problem"]) == {"has tiles of 0.5 um/px, the model is for 1 um/px; tile its slide anew"}
    refused = {
        "for 32 px": (model_file, altered(tiny_cohort, tmp_path / "large", tile_size=64)),
        "the model is for ordinary images": (image_model, tiny_cohort),
        "there is no slide in this folder": (model_file, tmp_path / "pictures"),
    }
    picture(tmp_path / "pictures" / "a.png", 0)
    for reason, (model, given) in refused.items():
        with pytest.raises(InputError, match="nothing could be predicted") as error:
            predict(model, given, tmp_path / "out", quiet=True)
        assert reason in str(error.value)
        assert reason in read_problems(tmp_path / "out")["problem"][0]
    differs = predict(model_file, slide_run / "cohort", tmp_path / "differs", quiet=True)
    assert any("overlap is 8 there, 0 in the model" in note for note in differs.notes)


def test_mistakes_are_said_before_work_begins(model_file, evaluated_run, tiny_cohort, tmp_path):
    for given, overrides, message in (
        ([tmp_path / "absent.svs"], [], "there is no such file or folder"),
        ([], [], "nothing to predict"),
        ([tiny_cohort], ["refine.epochs=3"], "a trained model keeps its settings"),
        ([tiny_cohort], ["engine.accelerator=tpu"], "engine.accelerator"),
        ([tiny_cohort], ["plugins=[absent.py]"], "there is no file"),
    ):
        with pytest.raises(InputError, match=message):
            predict(model_file, given, tmp_path / "out", overrides=overrides, quiet=True)
    assert not (tmp_path / "out").exists()
    for out, what in ((evaluated_run, "is a run"), (tiny_cohort, "is a cohort"), (model_file, "is a file")):
        with pytest.raises(InputError, match=what):
            predict(model_file, tiny_cohort, out, quiet=True)
    foreign = tmp_path / "mine" / "predictions.csv"
    foreign.parent.mkdir()
    foreign.write_text("precious")
    with pytest.raises(InputError, match="`its2clr predict` did not write"):
        predict(model_file, tiny_cohort, foreign.parent, quiet=True)
    assert foreign.read_text() == "precious"


def test_a_call_that_fails_leaves_what_was_predicted_before(model_file, tiny_cohort, tmp_path):
    out, broken = tmp_path / "out", tmp_path / "broken.svs"
    predict(model_file, tiny_cohort, out, quiet=True)
    before = (out / "predictions.csv").read_bytes()
    broken.write_bytes(b"no slide")
    with pytest.raises(InputError, match=r"nothing could be predicted .*from an earlier call"):
        predict(model_file, broken, out, quiet=True)
    assert (out / "predictions.csv").read_bytes() == before


@pytest.mark.parametrize("earlier", [False, True])
def test_a_call_killed_while_it_writes_goes_on_and_gives_the_same(model_file, tiny_cohort, tmp_path, earlier):
    out, cohort = tmp_path / "out", Cohort.open(tiny_cohort)
    if earlier:  # of other bags: a table of each must not pass for one prediction
        part = tmp_path / "part"
        shutil.copytree(cohort.path, part)
        write_bags(part, cohort.bags.iloc[:3])
        predict(model_file, part, out, quiet=True)
    child = os.fork()
    if child == 0:
        pd.DataFrame.to_csv = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # the table after the instances
        predict(model_file, tiny_cohort, out, quiet=True)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert len(pd.read_parquet(out / "instances.parquet")) == cohort.n_instances
    for read in (read_predictions, open_source):
        with pytest.raises(InputError, match="not finished; run the same"):
            read(out)
    predict(model_file, tiny_cohort, out, quiet=True)
    predict(model_file, tiny_cohort, tmp_path / "whole", quiet=True)
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert sorted(path.name for path in out.iterdir()) == names
    for name in names:
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_on_the_command_line(evaluated_run, tiny_cohort, tmp_path, its2clr):
    out = tmp_path / "out"
    code, _ = its2clr("predict", evaluated_run, tiny_cohort, "--out", out, "--set", "engine.accelerator=cpu")
    assert code == 0
    assert len(read_bags(out)) == 56
    code, said = its2clr("predict", tmp_path / "absent", tiny_cohort, "--out", out)
    assert code == 2
    assert "no such run or model file" in said

"""Nothing stale: whatever a result was made from changes, and the result is made anew, or refused with what changed.

The walk takes every kind of cache, makes its result, changes one thing on disk, and looks again.
"""

import json
import os
import shutil
from itertools import count, pairwise
from types import SimpleNamespace

import h5py
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from tests.conftest import TINY
from tests.viewer.viewer_runs import write_cohort, write_run

from its2clr.cohort import Cohort, load_tiles, tile_path
from its2clr.cohort.features.feature_file import feature_path
from its2clr.cohort.resample import resample_cohort
from its2clr.cohort.tiles import read_tiles, write_tile_file
from its2clr.config import EngineConfig
from its2clr.encoder_export import export_encoder
from its2clr.engine.devices import Engine
from its2clr.errors import InputError
from its2clr.files import write_json
from its2clr.maps.source import open_source
from its2clr.predict.model_of_run import export_model, open_model
from its2clr.predict.new_bags import predict
from its2clr.report.run_facts import collect
from its2clr.run.evaluation import evaluate
from its2clr.run.features import RunFeatures, open_run_features
from its2clr.run.made_from import MADE_FROM_FILE, read_made_from
from its2clr.run.names import encoder_file
from its2clr.run.opening import open_run
from its2clr.tile_store import TileStore
from its2clr.viewer.service import Viewer

TRAIN, TEST = "train", "test"


@pytest.fixture
def own(tiny_cohort, evaluated_run, tmp_path, monkeypatch):
    """A cohort and an evaluated run on it that may be changed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cohort, run = tmp_path / "cohort", tmp_path / "run"
    shutil.copytree(tiny_cohort, cohort, copy_function=linked)
    shutil.copytree(evaluated_run, run)
    settings = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**settings, "cohort": str(cohort)}))
    bags = Cohort.open(cohort).bags
    first = {split: bags.loc[bags["split"] == split, "bag_id"].iloc[0] for split in (TRAIN, TEST)}
    return SimpleNamespace(path=tmp_path, cohort=cohort, run=run, first=first)


def linked(source, target):
    """Tile files are shared with the original, so that they are not hashed for every test; see `one_tile`."""
    return os.link(source, target) if source.endswith(".h5") else shutil.copy2(source, target)


def turned(cohort, bag_ids):
    """Other pixels under the same names, written as packing does: the images of each bag in reverse."""
    for bag_id in bag_ids:
        path = tile_path(cohort, bag_id)
        tiles = read_tiles(path)
        images = [tiles.encoded(number) for number in range(len(tiles))][::-1]
        write_tile_file(
            path, images, tiles.coords, tiles.names, tiles.labels, bag_id=bag_id, tile_size=tiles.tile_size,
            tile_size_level0=tiles.tile_size_level0, mpp=tiles.mpp, source=tiles.source, encoding=tiles.encoding,
        )  # fmt: skip


def one_tile(own, split=TEST):
    """One tile of one bag gets the bytes of its neighbour, behind the package's back."""
    path = tile_path(own.cohort, own.first[split])
    content = path.read_bytes()
    path.unlink()  # the original stays
    path.write_bytes(content)
    with h5py.File(path, "r+") as file:
        offsets, images = file["offsets"][:], file["images"][:]
        parts = [images[start:end] for start, end in pairwise(offsets)]
        parts[0] = parts[1]
        del file["images"], file["offsets"]
        file["images"] = np.concatenate(parts)
        file["offsets"] = np.concatenate([[0], np.cumsum([len(part) for part in parts])])


def repacked(own):
    turned(own.cohort, Cohort.open(own.cohort).bags["bag_id"])


def one_label(own, split=TEST):
    bags = pd.read_csv(own.cohort / "bags.csv", dtype=str)
    row = bags["bag_id"] == own.first[split]
    bags.loc[row, "label"] = str(1 - int(bags.loc[row, "label"].iloc[0]))
    bags.to_csv(own.cohort / "bags.csv", index=False)


def training_label(own):
    one_label(own, TRAIN)


def encoder(own):
    shutil.copy(encoder_file(own.run, "start"), encoder_file(own.run, "refined"))


TILES, TABLES = (one_tile, repacked), (one_label, training_label)
ALL = (*TILES, *TABLES, encoder)


def engine(**settings):
    made = Engine(EngineConfig(accelerator="cpu", **settings))
    made.bars.enabled = False
    return made


def decoded_on_disk(own):
    tiles = Cohort.open(own.cohort).split(TEST).without_labels()
    return lambda: TileStore.from_cohort(tiles, engine(tiles="disk")).images.numpy().tobytes()


def decoded_in_memory(own):
    tiles, held = Cohort.open(own.cohort).split(TEST).without_labels(), engine()
    held.memory = {}
    return lambda: TileStore.from_cohort(tiles, held).images.numpy().tobytes()


def features_on_disk(own):
    bags = Cohort.open(own.cohort).split(TEST).without_labels()
    return lambda: open_run_features(own.run, quiet=True).of("refined", bags).features.numpy().tobytes()


def features_in_memory(own):
    bags, kept = Cohort.open(own.cohort).split(TEST).without_labels(), open_run_features(own.run, quiet=True)
    held = RunFeatures(kept.run, kept.engine, write=False)
    return lambda: held.of("refined", bags).features.numpy().tobytes()


def features_of_decoded_tiles(own):
    stages = open_run(own.run, quiet=True, write_features=False)
    bags = stages.cohort.split(TRAIN)
    _ = stages.context.train.tiles
    own.first[TEST] = own.first[TRAIN]  # the bag that changes is one of these
    return lambda: stages._features.of("refined", bags).features.numpy().tobytes()


def evaluation(own):
    return lambda: json.dumps(evaluate(open_run(own.run, quiet=True), of_features=False), sort_keys=True)


def finished_training(own):
    return lambda: open_run(own.run, quiet=True).fit()


def half_finished_training(own):
    state = json.loads((own.run / "state.json").read_text())
    state["stages"] = {"pretrain": state["stages"]["pretrain"]}
    write_json(own.run / "state.json", state)
    return lambda: open_run(own.run, quiet=True).pretrain()


def extraction(own):
    unlabelled = Cohort.open(own.cohort).split(TEST).without_labels()
    return lambda: open_run(own.run, quiet=True).features("refined", unlabelled).features.numpy().tobytes()


def report(own):
    return lambda: [*collect(own.run).problems, collect(own.run).state.words]


def model_file(own):
    export_model(own.run)
    return lambda: open_model(own.run).fingerprint


def exported_card(own):
    numbers = count()

    def card():
        return (export_encoder(own.run, own.path / f"export{next(numbers)}") / "README.md").read_text()

    return card


def maps(own):
    return lambda: open_source(own.run).outdated


def map_of_a_bag(own):
    return lambda: dict(enumerate(open_source(own.run).best.bag(own.first[TEST]).instances))


def viewer_at_its_start(own):
    return lambda: Viewer(own.run).run()["outdated"]


def viewer_under_way(own):
    viewer = Viewer(own.run)
    number = viewer.table.number[own.first[TEST]]
    return lambda: (viewer.bag(number), viewer.picture_tile(number, 0, 0, 0))


def neighbours(own):
    viewer = Viewer(own.run)
    number = viewer.table.number[own.first[TEST]]
    return lambda: viewer.instance_neighbours(number, 0, viewer.model(None))


def predictions(own):
    predict(own.run, own.cohort, own.path / "predicted", quiet=True)
    return lambda: dict(enumerate(open_source(own.path / "predicted").best.bag(own.first[TEST]).instances))


def experiment(own):
    from its2clr.experiments.plan import Planner
    from its2clr.experiments.spec import Cell, read_budget

    def names():
        planner = Planner(read_budget("smoke"), {"": own.cohort}, None, {})
        job = planner.job(Cell(method="its2clr", cohort="sub_bags"), 0)
        return str(planner.folder(job)), str(planner.resampled(job))

    return names


def study(own):
    from its2clr.tune.study import Study

    return lambda: Study.begin(own.path / "study", own.cohort, "demo").path


def resampled(own):
    return lambda: resample_cohort(Cohort.open(own.cohort), own.path / "resampled", keep_negatives=0.5, workers=1)


WALK = {
    decoded_on_disk: TILES,
    decoded_in_memory: (one_tile,),
    features_on_disk: (*TILES, encoder),
    features_in_memory: (one_tile, encoder),
    features_of_decoded_tiles: (one_tile,),
    extraction: (one_tile, training_label, encoder),
    evaluation: ALL,
    finished_training: (one_tile, training_label, encoder),
    half_finished_training: (one_tile, training_label),
    report: (one_tile, *TABLES, encoder),
    model_file: (encoder,),
    exported_card: (one_tile, *TABLES, encoder),
    maps: (one_tile, *TABLES, encoder),
    map_of_a_bag: (one_tile,),
    viewer_at_its_start: (one_tile, *TABLES, encoder),
    viewer_under_way: ALL,
    neighbours: (one_tile, encoder),
    predictions: (one_tile,),
    experiment: (one_tile, *TABLES),
    study: (one_tile, training_label),
    resampled: (one_tile, *TABLES),
}
"""Every cache, and the changes that its result depends on."""


def outcome(look):
    try:
        return look()
    except InputError as error:
        return error


@pytest.mark.parametrize(
    ("cache", "change"),
    [(cache, change) for cache, changes in WALK.items() for change in changes],
    ids=lambda function: function.__name__,
)
def test_a_change_is_never_answered_from_a_cache(own, cache, change):
    look = cache(own)
    first = look()
    assert look() == first  # without a change nothing is refused
    change(own)
    second = outcome(look)
    assert second != first
    if isinstance(second, InputError) and change in TILES and cache is not resampled:
        assert own.first[TEST] in str(second) or "tiles" in str(second)


def test_a_new_run_on_other_pixels_trains_on_them(tiny_cohort, tmp_path):
    """The decoded tiles of the old pixels are on disk, under the same names of bags."""
    cohort = tmp_path / "cohort"
    shutil.copytree(tiny_cohort, cohort)
    settings = [*TINY, "engine.tiles=disk", "pretrain.epochs=1"]

    def trained(name):
        stages = open_run(tmp_path / name, cohort, "demo", settings, quiet=True)
        stages.pretrain()
        assert torch.equal(
            stages.context.train.tiles.images, torch.from_numpy(load_tiles(stages.cohort.split("train")))
        )
        return encoder_file(tmp_path / name, "start").read_bytes()

    first = trained("first")
    turned(cohort, Cohort.open(cohort).bags["bag_id"])
    assert trained("second") != first


def test_evaluating_a_run_whose_tiles_changed_names_the_bag(own):
    before = (own.run / "predictions.parquet").read_bytes()
    one_tile(own)
    with pytest.raises(InputError, match=f"other tiles: bag {own.first[TEST]}") as caught:
        evaluate(open_run(own.run, quiet=True))
    assert "restore it, or train a new run" in str(caught.value)
    assert (own.run / "predictions.parquet").read_bytes() == before


def test_features_of_a_changed_bag_are_made_anew(own):
    bags = Cohort.open(own.cohort).split(TEST).without_labels()
    one_tile(own)
    features = open_run_features(own.run, quiet=True)
    found = features.of("refined", bags).features
    assert torch.equal(found, features.extract("refined", bags))
    kept = open_run_features(own.run, quiet=True)
    kept.extract = None
    assert torch.equal(kept.of("refined", bags).features, found)  # and kept under what they were made from


def test_features_that_somebody_edited_are_made_anew(own):
    bags = Cohort.open(own.cohort).split(TEST).without_labels()
    features = open_run_features(own.run, quiet=True)
    first = features.of("refined", bags).features
    path = feature_path(own.run / "features" / "refined", own.first[TEST])
    with h5py.File(path, "r+") as file:
        file["features"][...] = file["features"][...][::-1] + 1
    assert torch.equal(open_run_features(own.run, quiet=True).of("refined", bags).features, first)


def test_corrected_test_labels_are_measured_anew_and_said(own):
    before = evaluate(open_run(own.run, quiet=True))
    export_model(own.run)
    old = open_model(own.run).fingerprint
    one_label(own)
    stages, said = open_run(own.run, quiet=True), []
    stages.engine.say = said.append
    stages.fit()  # no training has seen them
    after = evaluate(stages)
    assert any(f"bag {own.first[TEST]}" in line and "test labels have changed" in line for line in said)
    assert after["refined"]["test"]["bag_auc"] != before["refined"]["test"]["bag_auc"]
    assert after["made_from"]["cohort"] != before["made_from"]["cohort"]
    assert after["made_from"]["models"] == before["made_from"]["models"]
    stages.engine.say = said.append
    evaluate(stages)
    assert said[-1] == "evaluate: already done"
    assert open_source(own.run).outdated == ()
    table = pd.read_parquet(own.run / "predictions.parquet")
    assert table.attrs["made_from"] == after["made_from"]
    assert open_model(own.run).fingerprint != old  # the model file of the earlier evaluation is not used
    exported = export_model(own.run)
    assert open_model(exported).description.cohort["made_from"]["cohort"] == after["made_from"]["cohort"]


def test_a_copied_run_and_cohort_are_the_same(own):
    evaluate(open_run(own.run, quiet=True))
    for path in own.cohort.glob("tiles/*.h5"):
        os.utime(path)
    stages, said = open_run(own.run, quiet=True), []
    stages.engine.say = said.append
    stages.fit()
    evaluate(stages)
    assert said[-1] == "evaluate: already done"
    assert open_source(own.run).outdated == ()


def test_a_run_without_its_cohort_still_predicts(own, tiny_cohort):
    from its2clr.estimator import ItS2CLR

    shutil.rmtree(own.cohort)
    bags = Cohort.open(tiny_cohort).split(TEST)
    assert ItS2CLR(run=own.run, verbose=False).predict_proba(bags).shape == (len(bags), 2)
    open_run(own.run, quiet=True).fit()


def test_a_run_of_an_older_version_is_taken_as_it_is_and_watched_from_then_on(own):
    from its2clr.files import hash_files

    (own.run / MADE_FROM_FILE).unlink()
    state = json.loads((own.run / "state.json").read_text())
    state["cohort"] = hash_files(own.cohort / "bags.csv", own.cohort / "cohort.json")
    write_json(own.run / "state.json", state)
    stages, said = open_run(own.run, quiet=True), []
    stages.engine.say = said.append
    stages.fit()
    assert "from now on the tiles are watched" in said[0]
    assert read_made_from(own.run).digest == Cohort.open(own.cohort).identity().digest
    one_tile(own)
    with pytest.raises(InputError, match="other tiles"):
        open_run(own.run, quiet=True).fit()


def test_a_run_of_an_older_version_with_other_tables_is_refused(own):
    (own.run / MADE_FROM_FILE).unlink()
    with pytest.raises(InputError, match=r"other bags\.csv or cohort\.json"):
        open_run(own.run, quiet=True).fit()


@pytest.mark.parametrize("what", ["pretrain.start", "refine.corrections"])
def test_what_settings_name_may_not_change_under_a_run(own, what):
    start, corrections = own.path / "start.safetensors", own.path / "corrections"
    shutil.copy(encoder_file(own.run, "start"), start)
    corrections.mkdir()
    (corrections / "note.txt").write_text("one")
    settings = [*TINY, f"pretrain.start={start}", f"refine.corrections={corrections}"]
    open_run(own.path / "new", own.cohort, "demo", settings, quiet=True).pretrain()
    open_run(own.path / "new", quiet=True).pretrain()
    if what == "pretrain.start":
        shutil.copy(encoder_file(own.run, "refined"), start)
    else:
        (corrections / "note.txt").write_text("two")
    with pytest.raises(InputError, match=f"{what}: .* has changed since"):
        open_run(own.path / "new", quiet=True).pretrain()
    start.unlink()
    shutil.rmtree(corrections)
    open_run(own.path / "new", quiet=True).pretrain()  # the run has taken what it needs


def test_a_viewer_sees_that_the_run_was_evaluated_again(own):
    viewer = Viewer(own.run)
    os.utime(own.run / "results.json")
    with pytest.raises(InputError, match=r"results\.json has changed since the viewer was started"):
        viewer.run()


def test_a_viewer_shows_the_slide_that_is_there_now(tmp_path):
    cohort = write_cohort(tmp_path / "cohort", ["a", "b"])
    viewer = Viewer(write_run(tmp_path / "run", cohort))
    level = viewer.pictures
    with level.open(0) as picture:
        deepest = picture.zoom.levels - 1
    before = viewer.picture_tile(0, deepest, 0, 0)
    turned(cohort, ["a"])
    assert viewer.picture_tile(0, deepest, 0, 0) != before


def test_the_report_says_what_changed(own):
    one_tile(own)
    found = collect(own.run)
    assert found.state.name == "outdated"
    assert f"other tiles: bag {own.first[TEST]}" in found.problems[0]


def test_commands_say_that_predictions_are_out_of_date(own, capsys):
    from its2clr.cli.results import geojson

    one_label(own)
    geojson(own.run, bags=[own.first[TRAIN]], split=None, limit=0, models=None, threshold=0.5, only=None, out=None)
    assert "warning: predictions are out of date: the cohort" in capsys.readouterr().out

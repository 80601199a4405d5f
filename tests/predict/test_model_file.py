import json
import math
import pickle
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load as load_tensors

from its2clr import ItS2CLR
from its2clr.aggregators import base
from its2clr.cohort import Cohort, CohortInfo
from its2clr.cohort.slides import SlideSettings
from its2clr.encoders.weights import load_network
from its2clr.engine.checkpoint import load_checkpoint, save_checkpoint
from its2clr.errors import InputError
from its2clr.predict.calibration import fit_calibration
from its2clr.predict.inference import open_for_prediction, score_bags
from its2clr.predict.inputs import sort_inputs
from its2clr.predict.model_file import MemberPart, join_model, load_model, save_model
from its2clr.predict.model_of_run import export_model, model_of_run, open_model
from its2clr.predict.tiling import Tiling
from its2clr.run.names import encoder_file
from its2clr.run.scores import Model, RunScores

PARTS = ("model.json", "encoder.safetensors", "aggregators.safetensors")


@pytest.fixture(scope="module")
def model_file(evaluated_run, tmp_path_factory):
    return export_model(evaluated_run, tmp_path_factory.mktemp("model") / "model.its2clr")


@pytest.fixture
def parts(model_file):
    with zipfile.ZipFile(model_file) as archive:
        return {name: archive.read(name) for name in PARTS}


def write(path, parts, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in parts.items() if isinstance(parts, dict) else parts:
            archive.writestr(name, content)
    return path


def changed(parts, **values):
    """The parts with some values of model.json replaced."""
    return {**parts, "model.json": json.dumps({**json.loads(parts["model.json"]), **values})}


def test_it_holds_the_runs_weights_and_equal_models_give_equal_bytes(model_file, evaluated_run, tmp_path):
    loaded = load_model(model_file)
    again = save_model(loaded, tmp_path / "again.its2clr")
    assert again.read_bytes() == model_file.read_bytes()
    assert export_model(evaluated_run, tmp_path / "anew.its2clr").read_bytes() == model_file.read_bytes()
    made = model_of_run(evaluated_run)
    assert made.fingerprint == loaded.fingerprint
    for name, tensor in made.members[0].encoder.state_dict().items():
        assert torch.equal(tensor, loaded.members[0].encoder.state_dict()[name])
    assert loaded.members[0].aggregators.seeds == made.members[0].aggregators.seeds
    assert len(loaded.members[0].aggregators.seeds) == 2
    for name, tensor in made.members[0].aggregators.state.items():
        assert torch.equal(tensor, loaded.members[0].aggregators.state[name])
    other = model_of_run(evaluated_run, Model("start", "dsmil"))
    assert other.description.method == "SimCLR"
    assert other.fingerprint != made.fingerprint


def test_a_model_of_several_predicts_their_mean(evaluated_run, tmp_path):
    single = [model_of_run(evaluated_run, Model(encoder, "dsmil")) for encoder in ("start", "refined")]
    several = join_model(
        single[0].description.model_copy(
            update={"more": (MemberPart(**single[1].description.model_dump(include={"encoder", "aggregator"})),)}
        ),
        single[0].members[0],
        single[1].members[0],
    )
    path = save_model(several, tmp_path / "model.its2clr")
    assert json.loads(zipfile.ZipFile(path).read("model.json"))["format"] == 2
    loaded = load_model(path)
    cohort = Cohort.open(RunScores(evaluated_run).cohort_path).split("test")
    scores = []
    for model in (*single, loaded):
        opened, engine = open_for_prediction(model, ["engine.accelerator=cpu"], quiet=True)
        scores.append(score_bags(opened, cohort, engine))
    np.testing.assert_allclose(
        scores[2].bag_probability, (scores[0].bag_probability + scores[1].bag_probability) / 2, rtol=1e-12
    )
    np.testing.assert_allclose(
        scores[2].instance_probability,
        (scores[0].instance_probability + scores[1].instance_probability) / 2,
        rtol=1e-12,
    )
    assert np.abs(scores[0].bag_probability - scores[1].bag_probability).max() > 1e-3
    with pytest.raises(InputError, match="encoders of 2 folds, and features are of one encoder"):
        ItS2CLR.from_model(path, verbose=False).transform(cohort)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    for left_out in ("encoder-2.safetensors", "aggregators-2.safetensors"):
        some = {name: content for name, content in parts.items() if name != left_out}
        with pytest.raises(InputError, match="describes other files of weights than there are"):
            load_model(write(tmp_path / "some.its2clr", some))
    swapped = {**parts, "aggregators-2.safetensors": parts["aggregators.safetensors"]}
    with pytest.raises(InputError, match=r"aggregators-2.safetensors does not belong to its model.json"):
        load_model(write(tmp_path / "swapped.its2clr", swapped))
    foreign = json.loads(parts["model.json"])
    foreign["more"][0]["encoder"]["pretrained"] = True
    with pytest.raises(InputError, match="asks for weights from elsewhere"):
        load_model(write(tmp_path / "foreign.its2clr", changed(parts, more=foreign["more"])))


def test_it_is_a_plain_archive_of_json_and_safetensors(model_file, parts, evaluated_run):
    with zipfile.ZipFile(model_file) as archive:
        assert archive.namelist() == list(PARTS)
        assert all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
    weights = load_tensors(parts["encoder.safetensors"])
    assert set(weights) == set(load_model(model_file).members[0].encoder.state_dict())  # and no projector
    described = json.loads(parts["model.json"])
    assert described["format"] == 1
    assert described["tiling"] == {**described["tiling"], "kind": "slides", "tile_size": 32, "mpp": 1.0}
    results = json.loads((evaluated_run / "results.json").read_text())
    assert described["metrics"]["bag_auc"] == results["refined"]["test"]["bag_auc"]
    assert described["cohort"]["splits"]["train"] == {"bags": 24, "positive_bags": 12, "instances": 384}


def test_no_patient_and_no_path_leaves_the_house(parts, evaluated_run):
    text = parts["model.json"].decode()
    bags = Cohort.open(RunScores(evaluated_run).cohort_path).bags
    for word in [*bags["bag_id"], *bags["group"], str(evaluated_run.parent), "/tmp", "/home"]:
        assert word not in text


def test_calibration_and_threshold_are_of_validation_bags_alone(model_file, evaluated_run, tmp_path, monkeypatch):
    table = pd.read_csv(evaluated_run / "bag_predictions.csv", converters={"probability": float})
    chosen = table.query("encoder == 'refined' and split == 'val'")
    loaded = load_model(model_file)
    assert loaded.calibration == fit_calibration(chosen["label"], chosen["probability"])
    assert loaded.calibration.bags == 16
    positive = chosen["probability"] >= loaded.description.threshold
    sensitivity = positive[chosen["label"] == 1].mean()
    specificity = 1 - positive[chosen["label"] == 0].mean()
    best = max(
        (chosen.loc[chosen["label"] == 1, "probability"] >= cut).mean()
        + (chosen.loc[chosen["label"] == 0, "probability"] < cut).mean()
        for cut in chosen["probability"]
    )
    assert sensitivity + specificity == pytest.approx(best)
    other = RunScores(evaluated_run).bags
    other.loc[other["split"] != "val", "label"] = 1 - other["label"]
    monkeypatch.setattr(RunScores, "bags", other)
    assert model_of_run(evaluated_run).calibration == loaded.calibration


def test_a_run_folder_serves_as_its_model(evaluated_run, model_file, tmp_path):
    assert open_model(evaluated_run).fingerprint == load_model(model_file).fingerprint
    with pytest.raises(InputError, match="no such run or model file"):
        open_model(tmp_path / "absent")
    with pytest.raises(InputError, match="not a run"):
        open_model(tmp_path)


def test_the_estimator_takes_a_model_file(model_file, evaluated_run, tiny_cohort):
    model = ItS2CLR.from_model(model_file, verbose=False)
    run = ItS2CLR(run=evaluated_run, verbose=False)
    test = Cohort.open(tiny_cohort).split("test")
    np.testing.assert_array_equal(model.predict_proba(test), run.predict_proba(test))
    pd.testing.assert_frame_equal(model.predict_instances(test), run.predict_instances(test), check_exact=True)
    features, expected = model.transform(test), run.transform(test)
    assert list(features) == list(expected)
    assert all(np.array_equal(features[bag], expected[bag]) for bag in expected)
    with pytest.raises(InputError, match="training needs a run folder"):
        model.fit(tiny_cohort)
    with pytest.raises(InputError, match="no such model file"):
        ItS2CLR.from_model(model_file.parent / "absent.its2clr")


def test_nothing_is_unpickled(model_file, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a pickle was read")

    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, refuse)
    load_model(model_file)


def test_damage_anywhere_is_noticed(model_file, tmp_path):
    content = model_file.read_bytes()
    damaged = tmp_path / "damaged.its2clr"
    for place in np.linspace(60, len(content) - 400, 23).astype(int).tolist():
        spoiled = bytearray(content)
        spoiled[place] ^= 0xFF
        damaged.write_bytes(spoiled)
        with pytest.raises(InputError, match=r"damaged\.its2clr"):
            load_model(damaged)
    for size in (0, 10, len(content) // 2, len(content) - 1):
        damaged.write_bytes(content[:size])
        with pytest.raises(InputError, match="damaged, or not a model"):
            load_model(damaged)


def test_what_is_no_model_is_refused(parts, tmp_path):
    path = tmp_path / "bad.its2clr"
    with pytest.raises(InputError, match="there is no such file"):
        load_model(path)
    with pytest.raises(InputError, match=r"it has no aggregators\.safetensors"):
        load_model(write(path, {name: parts[name] for name in PARTS[:2]}))
    with pytest.raises(InputError, match="holds parts that a model does not have"):
        load_model(write(path, {**parts, "../../evil.py": b"print()"}))
    assert not (tmp_path.parent / "evil.py").exists()
    with pytest.raises(InputError, match="is compressed"):
        load_model(write(path, parts, zipfile.ZIP_DEFLATED))
    with pytest.warns(UserWarning, match="Duplicate"):
        write(path, [*parts.items(), ("model.json", b"{}")])
    with pytest.raises(InputError, match="holds a part twice"):
        load_model(path)
    with pytest.raises(InputError, match="far too large"):
        load_model(write(path, {**parts, "model.json": b" " * (17 * 2**20)}))
    with pytest.raises(InputError, match=r"model\.json cannot be read"):
        load_model(write(path, {**parts, "model.json": b"[" * 200_000}))
    with pytest.raises(InputError, match="does not say its format"):
        load_model(write(path, {**parts, "model.json": b"[]"}))
    with pytest.raises(InputError, match=r"does not belong to its model\.json"):
        load_model(write(path, {**parts, "encoder.safetensors": parts["aggregators.safetensors"]}))


def test_what_model_json_may_not_say(parts, tmp_path):
    path = tmp_path / "bad.its2clr"
    described = json.loads(parts["model.json"])
    with pytest.raises(InputError, match=r"has format 99, this version .* reads up to 2; install the version"):
        load_model(write(path, changed(parts, format=99)))
    with pytest.raises(InputError, match="does not describe a model"):
        load_model(write(path, changed(parts, threshold="high")))
    with pytest.raises(InputError, match="does not describe a model"):
        load_model(write(path, changed(parts, surprise=1)))
    with pytest.raises(InputError, match="does not describe a model"):
        load_model(write(path, changed(parts, calibration={**described["calibration"], "slope": math.nan})))
    for settings in ({"overlap": -1}, {"overlap": "wide"}, {"tile_size": 64}, {"colour": 1}):
        tiling = {**described["tiling"], "settings": {**described["tiling"]["settings"], **settings}}
        with pytest.raises(InputError, match="does not describe a model"):
            load_model(write(path, changed(parts, tiling=tiling)))
    encoder = {**described["encoder"], "options": {"checkpoint_path": "weights.pth"}}
    with pytest.raises(InputError, match="weights from elsewhere"):
        load_model(write(path, changed(parts, encoder=encoder)))
    with pytest.raises(InputError, match="weights from elsewhere"):
        load_model(write(path, changed(parts, encoder={**described["encoder"], "pretrained": True})))
    with pytest.raises(InputError, match="do not fit"):
        load_model(write(path, changed(parts, encoder={**described["encoder"], "options": {}})))
    aggregator = {**described["aggregator"], "feature_dim": 17}
    with pytest.raises(InputError, match="do not fit the aggregator 'dsmil'"):
        load_model(write(path, changed(parts, aggregator=aggregator)))


@pytest.fixture
def little_memory():
    """A gigabyte more than now, so that a network of a larger size cannot be built."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


HUGE = [
    {"layers": [2000, 2000, 2000, 2000]},  # by many layers, 8.3 GB
    {"channels": [8192, 8192, 16384, 16384]},  # by large ones
    {"layers": [10**6, 2, 2, 2], "channels": [1, 1, 1, 1]},  # by very many tiny ones
]


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are those of Linux")
@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("options", HUGE)
def test_a_description_of_a_huge_network_takes_no_memory(parts, tmp_path, options):
    encoder = {**json.loads(parts["model.json"])["encoder"], "options": options}
    with pytest.raises(InputError, match=r"bad\.its2clr: .* far larger network; it was not built"):
        load_model(write(tmp_path / "bad.its2clr", changed(parts, encoder=encoder)))


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are those of Linux")
@pytest.mark.usefixtures("little_memory")
def test_a_checkpoint_of_a_huge_network_takes_no_memory(evaluated_run, tmp_path):
    tensors, state = load_checkpoint(encoder_file(evaluated_run, "refined"))
    encoder = {**state["encoder"], "options": HUGE[1]}
    save_checkpoint(tmp_path / "bad.safetensors", tensors, {**state, "encoder": encoder})
    with pytest.raises(InputError, match=r"bad\.safetensors: .* far larger network; it was not built"):
        load_network(tmp_path / "bad.safetensors")


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are those of Linux")
@pytest.mark.usefixtures("little_memory")
def test_a_description_of_a_huge_aggregator_takes_no_memory(parts, model_file, tmp_path):
    described = json.loads(parts["model.json"])
    aggregator = {**described["aggregator"], "feature_dim": 10**8}
    with pytest.raises(InputError, match=r"bad\.its2clr: .* far larger network; it was not built"):
        load_model(write(tmp_path / "bad.its2clr", changed(parts, aggregator=aggregator)))
    trained = replace(load_model(model_file).members[0].aggregators, feature_dim=10**8)
    with pytest.raises(InputError, match=r"aggregators \(dsmil\): .* far larger"):
        trained.modules()


def test_what_a_cohort_says_of_its_tiling(tmp_path):
    slides = SlideSettings(mpp=0.5, tile_size=64, overlap=4, stain="macenko", default_mpp=0.25, classes=("Tumor",))
    said = Tiling.of_cohort(CohortInfo(tile_size=64, encoding="jpeg", settings={**vars(slides), "label": "EGFR"}))
    assert (said.kind, said.mpp) == ("slides", 0.5)
    assert said.slide_settings() == replace(slides, default_mpp=None, classes=())
    images = {"tile_size": 48, "encoding": "jpeg", "quality": 80, "resize": "nearest", "crop": "ultrasound"}
    said = Tiling.of_cohort(CohortInfo(tile_size=48, encoding="jpeg", settings={**images, "splits": "manifest"}))
    assert (said.kind, said.mpp, said.image_settings()) == ("images", None, images)
    said.check()
    with pytest.raises(InputError, match="crop must be one of ultrasound"):
        said.model_copy(update={"settings": {**images, "crop": "fan"}}).check()
    resampled = CohortInfo(tile_size=48, encoding="png", settings={"source": "resample", "seed": 0})
    assert Tiling.of_cohort(resampled).kind == "tiles"
    found = sort_inputs([tmp_path], "tiles")
    assert "give the cohort" in found.left_out[0].problem


def test_a_missing_plugin_is_named(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(base.AGGREGATORS, "_known", dict(base.AGGREGATORS._known))
    described = json.loads(parts["model.json"])
    aggregator = {**described["aggregator"], "name": "ours"}
    path = write(tmp_path / "ours.its2clr", changed(parts, aggregator=aggregator, plugins=["ours_of_model_file.py"]))
    with pytest.raises(InputError, match=r"needs the aggregator 'ours'.*--set plugins=\[ours_of_model_file.py\]"):
        load_model(path)
    lines = ["from its2clr.aggregators.base import register", "from its2clr.aggregators.dsmil import DSMIL"]
    (tmp_path / "ours_of_model_file.py").write_text("\n".join([*lines, "register('ours')(type('Ours', (DSMIL,), {}))"]))
    model, _ = open_for_prediction(path, [f"plugins=[{tmp_path / 'ours_of_model_file.py'}]"], quiet=True)
    assert model.members[0].aggregators.name == "ours"

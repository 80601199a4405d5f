"""The stages of a run: in order, once, each from what the one before left, and never with a test bag in reach."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from tests.conftest import TINY

from its2clr.cohort import Cohort
from its2clr.encoders.weights import load_network
from its2clr.errors import InputError
from its2clr.refine.labels import GroundTruth, PseudoLabels
from its2clr.run import stages as module
from its2clr.run.names import aggregator_path, encoder_file
from its2clr.run.opening import open_run


def opened(run, cohort=None, *settings):
    stages = open_run(run, cohort, "demo" if cohort else None, [*TINY, *settings] if cohort else [], quiet=True)
    stages.said = []
    stages.engine.say = stages.said.append
    return stages


@pytest.fixture
def copy(evaluated_run, tmp_path):
    """A trained run of its own."""
    shutil.copytree(evaluated_run, tmp_path / "run")
    return tmp_path / "run"


def test_fit_does_every_stage_in_order(tiny_cohort, tmp_path, monkeypatch):
    done = []
    stages = opened(tmp_path / "run", tiny_cohort, "refine.reader={name: max, epochs: 2}")
    for name in ("pretrain", "refine"):
        monkeypatch.setattr(stages, name, lambda name=name: done.append(name))
    monkeypatch.setattr(stages, "aggregate", lambda encoder, name=None: done.append((encoder, name)))
    stages.fit()
    assert done == ["pretrain", ("start", None), ("start", "max"), "refine", ("refined", None), ("refined", "max")]


def test_a_finished_stage_is_not_done_again(copy):
    (copy / "checkpoints" / "refine-best-encoder-0001.safetensors").touch()  # of a process killed right after the stage
    stages = opened(copy)
    kept = [*copy.glob("checkpoints/encoder-*"), *copy.glob("aggregators/*")]
    before = {path: path.read_bytes() for path in kept}
    stages.fit()
    stages.pretrain()
    assert stages.said == [
        f"{stage}: already done" for stage in ("pretrain", "aggregate start", "refine", "aggregate refined")
    ]
    assert before == {path: path.read_bytes() for path in before}
    assert not list(copy.glob("checkpoints/*-best-*"))


def test_refining_pretrains_first(tiny_cohort, tmp_path):
    stages = opened(tmp_path / "run", tiny_cohort, "pretrain.epochs=0")
    stages.refine()
    assert list(stages.run.finished()) == ["pretrain", "refine"]
    assert not list((tmp_path / "run" / "checkpoints").glob("*-best-*"))  # what only a training under way needs


def test_training_sees_training_and_validation_bags_only(tiny_cohort, copy):
    stages, cohort = opened(copy), Cohort.open(tiny_cohort)
    for bags, split in ((stages.context.train, "train"), (stages.context.validation, "val")):
        expected = cohort.bags[cohort.bags["split"] == split]
        assert bags.bag_ids.tolist() == expected["bag_id"].tolist()
        assert bags.labels.tolist() == expected["label"].tolist()
    assert "test" not in set(stages.cohort.bags["split"])


def test_the_refined_encoder_is_that_of_the_round_the_algorithm_names(
    tiny_cohort, evaluated_run, tmp_path, monkeypatch
):
    kept = {}

    def refine(network, context, source, best, beside):
        for epoch in (0, 2):
            with torch.no_grad():
                network.encoder.backbone.conv1.weight.fill_(epoch)
            best.keep(epoch, network)
            kept[epoch] = best.path(epoch).read_bytes()
        return 0

    monkeypatch.setattr(module, "refine", refine)
    stages = opened(tmp_path / "run", tiny_cohort, f"pretrain.start={evaluated_run}")
    stages.refine()
    assert encoder_file(tmp_path / "run", "refined").read_bytes() == kept[0] != kept[2]


@pytest.mark.parametrize(("setting", "kind"), [("pseudo", PseudoLabels), ("ground_truth", GroundTruth)])
def test_where_labels_come_from_is_what_the_settings_say(
    tiny_cohort, evaluated_run, tmp_path, monkeypatch, setting, kind
):
    seen = []
    monkeypatch.setattr(
        module,
        "refine",
        lambda network, context, source, best, beside: seen.append(source) or best.keep(0, network) or 0,
    )
    settings = [f"pretrain.start={evaluated_run}", f"refine.labels={setting}", "refine.iterative=false"]
    stages = opened(tmp_path / "run", tiny_cohort, *settings)
    stages.refine()
    (source,) = seen
    assert type(source) is kind
    if kind is GroundTruth:
        truth = Cohort.open(tiny_cohort).split("train").instance_labels()
        assert (source.labels(None, None).probabilities == truth).all()


def test_an_aggregator_is_trained_on_its_encoders_features(copy, monkeypatch):
    stages = opened(copy)
    seen = []
    train = module.train_aggregators

    def record(config, features, validation, seeds, progress):
        seen.append((config, features, validation))
        return train(config, features, validation, seeds, progress)

    monkeypatch.setattr(module, "train_aggregators", record)
    trained = stages.aggregate("start", "max")
    (config, features, validation), *others = seen
    assert not others
    assert (config.name, config.options, config.epochs) == ("max", {}, 4)
    encoder = load_network(encoder_file(copy, "start")).encoder.eval()
    for found, bags in ((features, stages.context.train), (validation, stages.context.validation)):
        with torch.no_grad():
            expected = encoder(bags.tiles.images[:5])
        torch.testing.assert_close(found.features[:5], expected)
        assert found.labels.tolist() == bags.labels.tolist()
    assert len(trained.seeds) == 2
    assert aggregator_path(copy, "start", "max").is_file()
    assert stages.trained() == [("start", "dsmil"), ("refined", "dsmil"), ("start", "max")]
    assert stages.aggregate("start", "dsmil").name == "dsmil"  # the run's own, which is there already
    assert len(seen) == 1


def test_features_are_read_back_and_those_of_another_encoder_are_refused(copy, monkeypatch):
    stages = opened(copy)
    cohort = stages.cohort.split("val").without_labels()
    first = stages.features("start", cohort).features
    monkeypatch.setattr("its2clr.run.features.extract_features", lambda *arguments: pytest.fail("extracted again"))
    torch.testing.assert_close(stages.features("start", cohort).features, first)
    monkeypatch.undo()
    network = load_network(encoder_file(copy, "start"))
    with torch.no_grad():
        network.encoder.backbone.conv1.weight.mul_(2)
    from its2clr.encoders.weights import save_network

    save_network(encoder_file(copy, "start"), network, stages.config, {})
    with pytest.raises(InputError, match=r"encoder-start\.safetensors: is not what `pretrain` wrote"):
        stages.features("start", cohort)


def test_features_may_stay_in_memory(tiny_cohort, evaluated_run, tmp_path):
    settings = [*TINY, f"pretrain.start={evaluated_run}"]
    stages = open_run(tmp_path / "run", tiny_cohort, "demo", settings, quiet=True, write_features=False)
    stages.pretrain()
    cohort = stages.cohort.split("val").without_labels()
    assert stages.features("start", cohort).features is stages.features("start", cohort).features
    assert not (tmp_path / "run" / "features").exists()


def test_new_bags_must_have_the_tile_size_of_the_run(copy, tmp_path):
    from its2clr.cohort.synthetic.synthetic_cohort import make_synthetic

    make_synthetic(tmp_path / "other", size="tiny", workers=1, tile_size=24)
    stages = opened(copy)
    with pytest.raises(InputError, match=r"tiles of 24 px, this run was trained on 32 px; .* --tile-size 32"):
        stages.represent("refined", Cohort.open(tmp_path / "other"))
    bags = stages.cohort.split("val").without_labels()
    np.testing.assert_array_equal(
        stages.represent("refined", bags).features.numpy(), stages.features("refined", bags).features.numpy()
    )


def test_what_is_not_there_is_said(tiny_cohort, tmp_path):
    stages = opened(tmp_path / "run", tiny_cohort)
    with pytest.raises(InputError, match="no encoder named 'simclr'; there are start, refined, end_to_end"):
        stages.aggregate("simclr")
    with pytest.raises(InputError, match="the refined encoder is not there yet; run `its2clr refine`"):
        stages.aggregate("refined")
    with pytest.raises(InputError, match="the end_to_end encoder is not there yet; run `its2clr end-to-end`"):
        stages.features("end_to_end", stages.cohort)
    shutil.copytree(tiny_cohort, tmp_path / "unlabelled")
    info = json.loads((tmp_path / "unlabelled" / "cohort.json").read_text())
    (tmp_path / "unlabelled" / "cohort.json").write_text(json.dumps({**info, "labelled": False}))
    bags = pd.read_csv(tmp_path / "unlabelled" / "bags.csv", dtype=str)
    bags.drop(columns="label").to_csv(tmp_path / "unlabelled" / "bags.csv", index=False)
    with pytest.raises(InputError, match="has no labels; it can be predicted, not trained with"):
        opened(tmp_path / "other", tmp_path / "unlabelled").pretrain()

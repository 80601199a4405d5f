import copy
import json

import numpy as np
import pytest
import torch
from tests.conftest import TINY

from its2clr.aggregators import create_aggregator
from its2clr.baselines import end_to_end
from its2clr.baselines.end_to_end import EndToEndNetwork
from its2clr.cohort import Cohort
from its2clr.config import EncoderConfig
from its2clr.encoders.encoder import create_encoder
from its2clr.engine.checkpoint import load_checkpoint
from its2clr.errors import InputError
from its2clr.run.evaluation import evaluate
from its2clr.run.opening import open_run

pytestmark = pytest.mark.xdist_group("end to end")  # what they share is made once
SIZES = [7, 3, 12]


def network(norm="batch", tiles_per_pass=4, aggregator="dsmil"):
    torch.manual_seed(0)
    options = {"channels": [8, 8, 16, 16], "stem_width": 8, "drop_path_rate": 0.3}
    encoder = create_encoder(EncoderConfig(name="resnet18", options=options, norm=norm))
    return EndToEndNetwork(encoder, create_aggregator(aggregator, 16), tiles_per_pass).double().train()


def tiles(count):
    return torch.rand(count, 3, 48, 48, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradients(model, images, sizes, labels, seed=3):
    model.zero_grad()
    torch.manual_seed(seed)  # drop-path
    loss, _ = model(images, sizes, labels)
    loss.backward()
    return loss.item(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("aggregator", ["dsmil", "max", "instance_attention", "transformer"])
def test_gradients_in_passes_equal_those_of_the_whole_bag(aggregator):
    """Instance norm and no drop-path: a tile's features do not depend on the pass, so any cut gives the same."""
    model = network("instance", aggregator=aggregator)
    for module in model.modules():
        if hasattr(module, "drop_prob"):
            module.drop_prob = 0.0
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    images, labels = tiles(sum(SIZES)), torch.tensor([1.0, 0.0, 1.0])
    model.tiles_per_pass = 10_000
    whole = gradients(model, images, SIZES, labels)
    assert any(gradient.abs().max() > 1e-6 for gradient in whole[1].values())
    for tiles_per_pass in (2, 5, 12):
        model.tiles_per_pass = tiles_per_pass
        assert_same(gradients(model, images, SIZES, labels), whole)


def test_gradients_computed_again_equal_plain_ones_with_batch_norm_and_drop_path():
    """The same passes, once with all activations kept: the reference is plain autograd."""
    model = network("batch")
    images, labels = tiles(sum(SIZES)), torch.tensor([1.0, 0.0, 1.0])
    plain = copy.deepcopy(model)
    plain.represent = lambda bag, again: EndToEndNetwork.represent(plain, bag, again=False)
    expected = gradients(plain, images, SIZES, labels)
    assert_same(gradients(model, images, SIZES, labels), expected)
    for name, buffer in plain.named_buffers():  # statistics count every pass once
        torch.testing.assert_close(model.get_buffer(name), buffer, rtol=1e-6, atol=1e-9)


def test_a_bag_does_not_depend_on_the_others_of_its_step():
    model = network("batch")
    for module in model.modules():
        if hasattr(module, "drop_prob"):
            module.drop_prob = 0.0
    images, labels = tiles(sum(SIZES)), torch.tensor([1.0, 0.0, 1.0])
    _, together = model(images, SIZES, labels)
    alone = [model(part, [len(part)], labels[:1])[1] for part in torch.split(images, SIZES)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-7)


def test_only_the_activations_of_one_pass_are_kept():
    """Bytes that autograd saves for the backward pass, as it reports them itself."""

    def saved(tiles_per_pass):
        total = 0

        def count(tensor):
            nonlocal total
            total += tensor.numel()
            return tensor

        model = network("instance", tiles_per_pass)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            model(tiles(24), [24], torch.tensor([1.0]))
        return total

    assert saved(4) < saved(24) / 20


def test_a_bag_of_one_tile_trains():
    loss, _ = gradients(network("batch"), tiles(9)[:, :, :32, :32], [1, 8], torch.tensor([0.0, 1.0]))
    assert np.isfinite(loss)


E2E = [*TINY, "end_to_end={epochs: 3, bags_per_step: 2, tiles_per_pass: 8, learning_rate: 0.001}"]


@pytest.fixture(scope="module")
def trained(tiny_cohort, tmp_path_factory):
    stages = open_run(tmp_path_factory.mktemp("end-to-end"), tiny_cohort, "demo", E2E, quiet=True)
    stages.end_to_end()
    return stages


def test_a_run_ends_with_results(trained, tiny_cohort):
    results = evaluate(trained)
    assert 0 <= results["end_to_end"]["test"]["bag_auc"] <= 1
    assert 0 <= results["end_to_end"]["test"]["instance_auc"] <= 1
    assert "rounds" not in results
    lines = (trained.run.path / "metrics.jsonl").read_text().splitlines()
    assert sum('"stage": "end_to_end"' in line and '"train_auc"' in line for line in lines) == 3
    assert not list((trained.run.path / "checkpoints").glob("end_to_end-best-*"))
    found = trained.features("end_to_end", Cohort.open(tiny_cohort).split("test").without_labels())
    assert found.feature_dim == 16


def test_the_best_epoch_by_validation_is_kept(trained):
    lines = [json.loads(line) for line in (trained.run.path / "metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if line["stage"] == "end_to_end"]
    best = max(epochs, key=lambda line: (line["validation_auc"], -line["validation_loss"]))
    _, state = load_checkpoint(trained.run.checkpoint("encoder-end_to_end"))
    assert state["notes"]["best_epoch"] == best["epoch"]
    aggregator = trained.aggregate("end_to_end")
    assert aggregator.validation_auc[0] == pytest.approx(best["validation_auc"])


def test_a_stopped_run_goes_on_as_if_it_had_not(trained, tiny_cohort, tmp_path, monkeypatch):
    from its2clr.baselines import end_to_end

    stages = open_run(tmp_path / "run", tiny_cohort, "demo", E2E, quiet=True)
    original, calls = end_to_end._train_epoch, []

    def stop_in_the_second(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(end_to_end, "_train_epoch", stop_in_the_second)
    with pytest.raises(KeyboardInterrupt):
        stages.end_to_end()
    monkeypatch.undo()
    open_run(tmp_path / "run", quiet=True).end_to_end()
    expected, _ = load_checkpoint(trained.run.checkpoint("end_to_end"))
    found, _ = load_checkpoint(tmp_path / "run" / "checkpoints" / "end_to_end.safetensors")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)


@pytest.mark.parametrize("lost", [["end_to_end"], ["end_to_end", "aggregate end_to_end"]])
def test_a_run_killed_while_it_is_noted_as_finished_ends_the_same(trained, tiny_cohort, tmp_path, monkeypatch, lost):
    monkeypatch.setattr("its2clr.engine.training_state.BestCheckpoints.remove", lambda self: None)
    stages = open_run(tmp_path / "run", tiny_cohort, "demo", E2E, quiet=True)
    stages.end_to_end()
    monkeypatch.undo()
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    for stage in lost:
        del state["stages"][stage]
    (tmp_path / "run" / "state.json").write_text(json.dumps(state))
    again = open_run(tmp_path / "run", quiet=True)
    again.end_to_end()
    expected, found = trained.aggregate("end_to_end"), again.aggregate("end_to_end")
    assert all(torch.equal(expected.state[name], found.state[name]) for name in expected.state)
    assert not list((tmp_path / "run" / "checkpoints").glob("end_to_end-best-*"))


def test_from_scratch_needs_no_pretraining(tiny_cohort, tmp_path):
    settings = [*E2E, "end_to_end.start=scratch", "end_to_end.epochs=1"]
    stages = open_run(tmp_path / "run", tiny_cohort, "demo", settings, quiet=True)
    stages.end_to_end()
    assert stages.run.done("pretrain") is None


def test_positive_bags_weigh_as_the_settings_of_the_aggregator_say(tiny_cohort, tmp_path, monkeypatch):
    def stop(network, *arguments):
        raise RuntimeError(f"weight {network.aggregator.positive_weight}")

    monkeypatch.setattr(end_to_end, "_train_epoch", stop)
    settings = [*E2E, "end_to_end.start=scratch", "aggregator.positive_weight=9"]
    with pytest.raises(RuntimeError, match=r"weight 9\.0"):
        open_run(tmp_path / "run", tiny_cohort, "demo", settings, quiet=True).end_to_end()


def test_more_bags_per_step_than_bags_is_said(tiny_cohort, trained, tmp_path):
    settings = [*E2E, "end_to_end.bags_per_step=99", f"pretrain.start={trained.run.path}"]
    with pytest.raises(InputError, match="at most the 24 training bags"):
        open_run(tmp_path / "run", tiny_cohort, "demo", settings, quiet=True).end_to_end()

"""What only a GPU can show: recorded, compiled and fed from host memory, a training is the training it was."""

import gc
import weakref

import pytest
import torch
from tests.conftest import TINY
from tests.test_training import ROWS, STILL, Line, cubes, tiles

from its2clr.config import DinoConfig, EngineConfig, PretrainConfig
from its2clr.encoders.extraction import extract_features
from its2clr.encoders.weights import create_network
from its2clr.engine.checkpoint import load_optimiser, optimiser_tensors
from its2clr.engine.devices import Engine
from its2clr.errors import TrainingError
from its2clr.pretrain.loop import prepare
from its2clr.pretrain.simclr import simclr_objective
from its2clr.settings import resolve_config
from its2clr.tile_store import TileStore
from its2clr.training import Batches, TrainingStep, train_epoch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch):
    """The order of additions still differs between two runs on a GPU, and training enlarges it."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def random_tiles(count=256, side=32):
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def make_step(tiles, objective=None, **settings):
    engine = Engine(EngineConfig(accelerator="cuda", precision="32-true", **settings))
    engine.bars.enabled = False
    config = resolve_config("demo", TINY)
    torch.manual_seed(0)
    network = create_network(config)
    step = TrainingStep(network, TileStore(tiles), objective or simclr_objective(0.2), config.pretrain, 64, 1, engine)
    return step, network


def train(step, epochs, first=1):
    indices = torch.randperm(256, generator=torch.Generator().manual_seed(1)).view(4, 64)
    return [
        train_epoch(step, Batches(indices), [0.01] * 4, (0, "pretrain", epoch)).loss
        for epoch in range(first, first + epochs)
    ]


def test_a_recorded_step_is_the_plain_one():
    recorded, network = make_step(random_tiles().cuda())
    plain, reference = make_step(random_tiles().cuda())
    plain.replays = False
    assert train(recorded, 4) == pytest.approx(train(plain, 4), rel=1e-3)
    for one, other in zip(network.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


def test_a_recorded_step_clips_gradients_and_has_the_weight_decay_of_each_step():
    """Recorded at the fourth step, with other rates and decays in every step."""
    engine = Engine(EngineConfig(accelerator="cuda", precision="32-true"))
    engine.bars.enabled = False
    settings = {"optimiser": "adamw", "learning_rate": 0.01, "weight_decay_end": 9.0, "decay_biases": False}
    config = PretrainConfig(views=STILL, gradient_clip=10, **settings)
    rates, decays = [0.01 * (1 + number % 3) for number in range(9)], [float(number) for number in range(9)]
    found = []
    for replays in (True, False):
        step = TrainingStep(Line(), tiles(), cubes, config, 4, 9, engine)
        assert step.replays
        step.replays = replays
        train_epoch(step, Batches(ROWS.repeat(3, 1)), rates, (0, "pretrain", 1), decays=decays)
        found.append([parameter.detach() for parameter in step.network.parameters()])
    torch.testing.assert_close(*found)
    assert not torch.allclose(found[0][0].cpu(), Line().matrix)


@pytest.mark.parametrize("name", ["simclr", "moco", "byol", "dino", "bag_labels"])
def test_every_pretraining_method_trains_in_mixed_precision_with_adamw(name):
    engine = Engine(EngineConfig(accelerator="cuda"))
    engine.bars.enabled = False
    settings = {"method": name, "optimiser": "adamw", "learning_rate": 0.001, "queue_size": 128}
    dino = {"hidden_dim": 32, "bottleneck_dim": 16, "output_dim": 64, "local_size": 32}
    config = resolve_config("demo", TINY).pretrain.model_copy(update={**settings, "dino": DinoConfig(**dino)})
    network = create_network(resolve_config("demo", TINY))
    method = prepare(network, config, 0)
    tiles = TileStore(random_tiles().cuda())
    step = TrainingStep(
        method.network, tiles, method.loss, config, 64, 1, engine, crops=method.crops, records=method.records
    )
    assert step.replays == (name in {"simclr", "bag_labels"})
    indices = torch.randperm(256, generator=torch.Generator().manual_seed(1)).view(4, 64)
    batches = Batches(indices, (indices % 2) if method.labelled else None)
    before = [parameter.clone() for parameter in method.kept.encoder.parameters()]
    for epoch in (1, 2):

        def after_step(number, before=4 * (epoch - 1)):
            if method.update is not None:
                method.update(before + number, 16)

        found = train_epoch(step, batches, [0.001] * 4, (0, "pretrain", epoch), after_step, method.spread)
        assert 0 < found.spread <= 1
    after = list(method.kept.encoder.parameters())
    assert all(not torch.equal(one.to(other), other) for one, other in zip(before, after, strict=True))


def test_tiles_from_host_memory_train_the_same():
    assert train(make_step(random_tiles())[0], 4) == pytest.approx(
        train(make_step(random_tiles().cuda())[0], 4), rel=1e-3
    )


def test_a_compiled_network_trains_the_same():
    compiled = train(make_step(random_tiles().cuda(), compile="always")[0], 2)
    assert compiled == pytest.approx(train(make_step(random_tiles().cuda(), compile="never")[0], 2), rel=1e-3)


def test_a_training_put_back_goes_on_as_it_would_have():
    whole, _ = make_step(random_tiles().cuda())
    expected = train(whole, 4)
    first, network = make_step(random_tiles().cuda())
    assert train(first, 2) == pytest.approx(expected[:2], rel=1e-3)
    second, other = make_step(random_tiles().cuda())
    other.load_state_dict(network.state_dict())
    saved = {name: tensor.cpu().contiguous() for name, tensor in optimiser_tensors(first.optimiser).items()}
    load_optimiser(second.optimiser, saved)
    assert train(second, 2, first=3) == pytest.approx(expected[2:], rel=1e-3)


def test_features_are_the_same_from_host_memory():
    engine = Engine(EngineConfig(accelerator="cuda", precision="32-true"))
    engine.bars.enabled = False
    encoder = create_network(resolve_config("demo", TINY)).to(engine.device).encoder
    on_gpu, on_host = (
        extract_features(encoder, TileStore(tiles), engine, 60) for tiles in (random_tiles().cuda(), random_tiles())
    )
    torch.testing.assert_close(on_gpu, on_host)


def test_an_objective_that_looks_at_values_is_refused_with_advice():
    step, _ = make_step(
        random_tiles().cuda(), lambda embeddings, *_: embeddings.square().mean() * embeddings[0, 0].item()
    )
    with pytest.raises(TrainingError, match=r"engine.record_steps=false"):
        train(step, 2)
    assert torch.rand(3, device="cuda").max() < 1  # the process can go on
    assert len(train(make_step(random_tiles().cuda())[0], 2)) == 2


def test_recordings_go_with_their_step():
    step, _ = make_step(random_tiles().cuda())
    train(step, 2)
    recording = weakref.ref(step._recorded)
    gc.disable()
    try:
        del step
        assert recording() is None
    finally:
        gc.enable()


def test_garbage_left_by_others_does_not_spoil_a_recording():
    for _ in range(3):
        step, _ = make_step(random_tiles().cuda())
        train(step, 2)
        step.cycle = step  # only the search for cycles finds it
        del step
        gc.set_threshold(1)  # it searches all the time
        try:
            train(make_step(random_tiles().cuda())[0], 2)
        finally:
            gc.set_threshold(700)


def test_a_batch_too_large_is_answered_with_advice():
    from its2clr.engine.memory import memory_advice

    with pytest.raises(TrainingError, match=r"out of GPU memory.*pretrain.batch_size"), memory_advice("pretrain"):
        torch.empty(2**45, dtype=torch.uint8, device="cuda")

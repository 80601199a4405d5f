import json
import math
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.conftest import TINY
from tests.test_files import killed_while_writing
from torch import nn

from its2clr.encoders.encoder import create_encoder
from its2clr.encoders.weights import create_network
from its2clr.engine import checkpoint as checkpoint_module
from its2clr.engine.checkpoint import load_checkpoint, save_checkpoint
from its2clr.engine.devices import Engine, share_batch_norm
from its2clr.engine.guard import PATIENCE, CollapseGuard, embedding_spread, looks_stuck
from its2clr.engine.training_state import TrainingState
from its2clr.errors import InputError, TrainingError
from its2clr.files import atomic_path
from its2clr.run.directory import RunDirectory
from its2clr.seeds import derive_seed
from its2clr.settings import resolve_config
from its2clr.tile_store import TileStore
from its2clr.training import Batches, TrainingStep, train_epoch


@dataclass
class Found:
    """What a training may have found."""

    extra: torch.Tensor | None = None
    best: float | None = None
    epochs_collapsed: int = 0


@pytest.fixture
def run(tmp_path):
    engine = Engine()
    engine.bars.enabled = False
    return RunDirectory(tmp_path / "run", resolve_config("demo", TINY), tmp_path / "cohort", engine)


def reopen(run, *overrides, cohort=None):
    return RunDirectory(run.path, resolve_config("demo", [*TINY, *overrides]), cohort, run.engine)


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail():
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_checkpoints_round_trip_and_damage_is_said(tmp_path):
    path = tmp_path / "c.safetensors"
    save_checkpoint(path, {"a": torch.arange(3.0)}, {"epoch": 2})
    tensors, state = load_checkpoint(path)
    assert (tensors["a"].tolist(), state) == ([0, 1, 2], {"epoch": 2})
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(InputError, match="not a readable safetensors"):
        load_checkpoint(path)
    with pytest.raises(InputError, match="no such checkpoint"):
        load_checkpoint(tmp_path / "none")


def test_changed_settings_are_refused_with_the_difference(run, tmp_path):
    assert reopen(run).config == run.config
    assert reopen(run, "refine.temperature=0.5").config.refine.temperature == 0.5  # nothing has begun yet
    reopen(run)
    (run.path / "checkpoints").mkdir()
    with pytest.raises(InputError, match=r"refine.temperature: 0\.2 -> 0\.5"):
        reopen(run, "refine.temperature=0.5")
    with pytest.raises(InputError, match=r"cohort: .* -> elsewhere"):
        reopen(run, cohort="elsewhere")


def test_a_resumed_optimiser_goes_on_as_if_nothing_happened(run):
    def build():
        torch.manual_seed(0)
        network = nn.Linear(3, 2)
        return network, torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)

    def step(network, optimiser, seed):
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        optimiser.zero_grad()
        network(inputs).square().sum().backward()
        optimiser.step()

    network, optimiser = build()
    for seed in range(4):
        step(network, optimiser, seed)
    other, other_optimiser = build()
    state = TrainingState(run, "test", other, other_optimiser, Found())
    assert state.resume() == 0
    for seed in range(2):
        step(other, other_optimiser, seed)
    state.found.extra, state.found.best = torch.ones(2), 0.5
    state.save(2)
    fresh, fresh_optimiser = build()
    resumed = TrainingState(run, "test", fresh, fresh_optimiser, Found())
    assert resumed.resume() == 2
    assert (resumed.found.best, resumed.found.extra.tolist()) == (0.5, [1, 1])
    for seed in range(2, 4):
        step(fresh, fresh_optimiser, seed)
    assert torch.equal(network.weight, fresh.weight)


def test_metrics_of_epochs_that_are_done_again_are_dropped(run):
    for stage, epoch in [("pretrain", 1), ("refine", 1), ("refine", 2), ("refine", 3)]:
        run.log(stage, epoch, 3, {"loss": 1.0})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "ref')  # a line cut short by a kill
    run.forget_after("refine", 1)
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["stage"], line["epoch"]) for line in lines] == [("pretrain", 1), ("refine", 1)]


def test_stages_are_remembered(run):
    assert run.done("pretrain") is None
    run.mark_done("pretrain", epochs=3)
    (run.path / "checkpoints").mkdir()
    assert reopen(run).done("pretrain") == {"epochs": 3}


def test_collapse_is_seen_after_some_epochs_and_stops_with_advice():
    guard = CollapseGuard("refine", 101, 2, Found())
    guard.check(1, math.log(100), spread=0.001)
    guard.check(2, math.log(100), spread=0.5)  # spread again: the count starts anew
    guard.check(3, math.log(100), spread=0.001)
    with pytest.raises(TrainingError, match=r"refine: the representation collapsed by epoch 4.*refine.temperature"):
        guard.check(4, math.log(100) - 0.01, spread=0.001)


def test_a_healthy_training_is_not_stopped():
    guard = CollapseGuard("refine", 101, 1, Found())
    for epoch in range(20):
        guard.check(epoch, 3.0, spread=0.001)
        guard.check(epoch, math.log(100), spread=0.4)


STUCK = {
    "a tiny cohort, 128 rows": (
        [4.8621, 4.8532, 4.8514, 4.8483, 4.8475, 4.8465, 4.8469, 4.8466, 4.8468, 4.846],
        [0.0266, 0.0211, 0.0173, 0.0173, 0.0143, 0.0117, 0.0116, 0.0115, 0.0106, 0.0121],
        128,
    ),
    "as first reported: the loss of a point, spread 0.016 to 0.024": (
        [math.log(1023)] * 10,
        [0.024, 0.021, 0.018, 0.016, 0.019, 0.022, 0.017, 0.02, 0.024, 0.016],
        1024,
    ),
}
HEALTHY = {
    "the demo, 256 rows": (
        [5.8787, 5.5365, 5.5315, 5.5112, 5.4885, 5.4714, 5.4152, 5.385, 5.3617, 5.347, 5.3574, 5.3394],
        [0.0474, 0.0374, 0.0376, 0.0513, 0.0613, 0.0641, 0.0779, 0.0899, 0.0963, 0.1011, 0.0965, 0.0981],
        256,
    ),
    "an adapter over features, 64 rows": (
        [4.1493, 4.0976, 4.0611, 4.025, 4.071],
        [0.0186, 0.1045, 0.0894, 0.1443, 0.0803],
        64,
    ),
}


@pytest.mark.parametrize(("losses", "spreads", "rows"), STUCK.values(), ids=STUCK)
def test_a_refinement_that_stayed_stuck_for_ten_epochs_is_seen_in_the_fourth(losses, spreads, rows):
    guard = CollapseGuard("refine", rows, PATIENCE["refine"], Found())
    seen = [guard.sees(loss, spread) for loss, spread in zip(losses, spreads, strict=True)]
    assert seen == [False] * 3 + [True] * 7


@pytest.mark.parametrize(("losses", "spreads", "rows"), HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_refinement_passes_near_the_loss_of_a_point_unseen(losses, spreads, rows):
    found = Found()
    guard = CollapseGuard("refine", rows, PATIENCE["refine"], found)
    for loss, spread in zip(losses, spreads, strict=True):
        assert not guard.sees(loss, spread)
        assert found.epochs_collapsed <= 1


def test_a_loss_below_that_of_a_point_is_not_stuck_however_small_the_spread():
    """At a low temperature two classes may be told apart and yet lie close together."""
    assert looks_stuck("refine", 0.995 * math.log(1023), 0.02, math.log(1023))
    assert not looks_stuck("refine", 0.985 * math.log(1023), 0.02, math.log(1023))


def test_a_fresh_network_may_begin_near_a_point():
    assert looks_stuck("refine", math.log(1023), 0.02, math.log(1023))
    assert not looks_stuck("pretrain", math.log(1023), 0.02, math.log(1023))
    assert looks_stuck("pretrain", math.log(1023), 0.005, math.log(1023))


def test_spread_is_zero_for_a_point_and_near_one_for_all_directions():
    assert embedding_spread(torch.ones(20, 5) * torch.rand(20, 1).add(0.1)) == pytest.approx(0, abs=1e-6)
    assert embedding_spread(torch.randn(5000, 16, generator=torch.Generator().manual_seed(0))) > 0.9


def test_seeds_depend_on_every_key_and_nothing_else():
    assert derive_seed(0, "a", 1) == derive_seed(0, "a", 1)
    assert len({derive_seed(0, "a", 1), derive_seed(0, "a", 2), derive_seed(1, "a", 1), derive_seed(0, "b", 1)}) == 4


def train_one_epoch(objective, encoder_options=None):
    overrides = [*TINY, f"encoder.options={{channels: [8, 8, 16, 16], stem_width: 8, {encoder_options or ''}}}"]
    config = resolve_config("demo", overrides)
    engine = Engine()
    engine.bars.enabled = False
    torch.manual_seed(0)
    network = create_network(config)
    images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tiles = TileStore(images)
    batches = Batches(torch.arange(8)[None])
    step = TrainingStep(network, tiles, objective, config.refine, 8, 1, engine)
    return train_epoch(step, batches, [0.1], (0, "refine", 3))


def test_not_a_number_stops_with_advice():
    with pytest.raises(TrainingError, match=r"became nan in epoch 3.*refine.learning_rate"):
        train_one_epoch(lambda embeddings, labels, anchors: embeddings.sum() * float("nan"))


def test_a_backbone_that_drops_at_random_is_reproducible_and_leaves_the_global_state_alone():
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        torch.random.set_rng_state(before)
        results.append(train_one_epoch(lambda embeddings, *_: embeddings.square().mean(), "drop_path_rate: 0.5"))
    assert results[0].loss == results[1].loss


def test_shared_batch_norm_keeps_fused_activations():
    torch.manual_seed(0)
    network = create_encoder("efficientnet_b0").eval()
    tiles = torch.rand(2, 3, 32, 32)
    expected = network(tiles)
    assert torch.allclose(share_batch_norm(network).eval()(tiles), expected, atol=1e-5)


def test_the_first_process_s_failure_is_raised():
    def fail():
        raise InputError("no space left")

    engine = Engine()
    assert engine.on_writer(lambda: 3) == 3
    with pytest.raises(InputError, match="no space left"):
        engine.on_writer(fail)


def test_the_library_below_says_nothing_of_its_own():
    told = "from its2clr.engine.devices import Engine; from its2clr.config import EngineConfig as E; "
    said = [sys.executable, "-c", told + "Engine(E(precision='bf16-mixed', accelerator='cpu'))"]
    ended = subprocess.run(said, capture_output=True, text=True, check=True)
    assert ended.stdout + ended.stderr == ""


def test_a_command_beside_a_training_leaves_what_that_is_writing(run):
    left = killed_while_writing(run.checkpoint("refine"))
    with atomic_path(run.checkpoint("refine")) as being_written:
        being_written.write_text("half")
        reopen(run)  # as `its2clr report` does
        assert being_written.exists()
        assert not left.exists()
    assert run.checkpoint("refine").read_text() == "half"


def test_numbers_are_in_the_event_file_at_once_and_repeated_epochs_are_forgotten(run):
    run.log("pretrain", 1, 9, {"loss": 0.5})
    run.log("pretrain", 2, 9, {"loss": 0.25, "spread": 1.0})
    run.forget_after("pretrain", 1)
    run.log("pretrain", 2, 9, {"loss": 0.125})
    events = EventAccumulator(str(run.path / "tensorboard" / "pretrain"))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("pretrain/loss")] == [(1, 0.5), (2, 0.125)]


def test_a_training_that_is_stopped_says_which_epoch_is_saved(run, capsys):
    run.engine.bars.enabled = True
    network = nn.Linear(2, 2)
    state = TrainingState(run, "refine", network, torch.optim.SGD(network.parameters(), lr=0.1), Found())
    for epoch, said in ((0, "refine: no epoch is saved yet"), (3, "refine: saved after epoch 3")):
        state.resume() if epoch == 0 else state.save(epoch, last=True)
        with pytest.raises(KeyboardInterrupt), run.lock():
            raise KeyboardInterrupt
        assert said in capsys.readouterr().out


def test_ctrl_c_while_a_checkpoint_is_written_waits_for_it(tmp_path, monkeypatch):
    def save(*arguments, **others):
        signal.raise_signal(signal.SIGINT)
        save_file(*arguments, **others)

    monkeypatch.setattr(checkpoint_module, "save_file", save)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path / "a.safetensors", {"x": torch.ones(3)}, {"epoch": 4})
    assert load_checkpoint(tmp_path / "a.safetensors")[1] == {"epoch": 4}


def test_a_damaged_config_is_said(run):
    (run.path / "config.yaml").write_text("seed: [1")
    with pytest.raises(InputError, match=r"config.yaml: damaged"):
        reopen(run)


def test_going_on_with_another_number_of_processes_is_refused(run):
    network = nn.Linear(2, 2)
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
    TrainingState(run, "refine", network, optimiser, Found()).save(1)
    tensors, state = load_checkpoint(run.checkpoint("refine"))
    save_checkpoint(run.checkpoint("refine"), tensors, {**state, "processes": 4})
    with pytest.raises(InputError, match=r"began with 4 process\(es\)"):
        TrainingState(run, "refine", network, optimiser, Found()).resume()


def test_a_batch_too_small_for_its_processes_is_said():
    engine = Engine()
    assert engine.divisible_batch_size("refine", 7) == 7
    engine.world_size = 4
    assert engine.divisible_batch_size("refine", 11) == 8
    with pytest.raises(InputError, match=r"refine.batch_size"):
        engine.divisible_batch_size("refine", 7)


def test_two_trainings_in_one_run_are_refused(run):
    with run.lock(), pytest.raises(InputError, match="another process is training"), reopen(run).lock():
        pass
    with run.lock():
        pass

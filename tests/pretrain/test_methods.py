"""Every pretraining method: its loss by hand, what it keeps, and that a training goes on as it would have."""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import TINY
from tests.refine.test_finetuning import stop_after

from its2clr.cohort.synthetic.synthetic_cohort import make_synthetic
from its2clr.config import DinoConfig, PretrainConfig
from its2clr.encoders.encoder import check_tile_size, create_encoder
from its2clr.encoders.weights import create_network
from its2clr.engine.checkpoint import load_checkpoint, under
from its2clr.errors import InputError, TrainingError
from its2clr.pretrain.loop import prepare
from its2clr.pretrain.method import METHODS
from its2clr.run.opening import open_run
from its2clr.settings import resolve_config
from its2clr.training import warmed_up

DINO = {"hidden_dim": 16, "bottleneck_dim": 8, "output_dim": 12, "local_views": 1}
SETTINGS = [*TINY, "pretrain.batch_size=48", "pretrain.queue_size=64", f"pretrain.dino={DINO}"]
RESNET50 = ["encoder.name=resnet50"]
VIT = [
    "encoder.name=vit_small_patch16_224",
    "encoder.options={img_size: 32, embed_dim: 24, depth: 2, num_heads: 3}",
    "pretrain.optimiser=adamw",
    "pretrain.learning_rate=0.001",
    "pretrain.warmup_epochs=1",
]
DINO_LONG = [
    "pretrain.weight_decay_end=0.4",
    "pretrain.decay_biases=false",
    "pretrain.gradient_clip=0.001",
    f"pretrain.dino={DINO | {'norm_last_layer': False, 'frozen_epochs': 1, 'teacher_warmup_epochs': 2}}",
    "pretrain.dino.teacher_temperature=0.07",
]
"""What DINO does in a long training; the gradients of so small a network are clipped only at so small a norm."""


@pytest.fixture(scope="module")
def small_cohort(tmp_path_factory):
    """Four tiles a bag: an epoch is a matter of a tenth of a second."""
    folder = tmp_path_factory.mktemp("cohort") / "small"
    make_synthetic(folder, size="tiny", workers=1, grid=(2, 2))
    return folder


def method_of(name, **settings):
    torch.manual_seed(0)
    network = create_network(resolve_config("demo", SETTINGS))
    settings = {"queue_size": 10, "dino": DinoConfig(**DINO), **settings}
    return prepare(network, PretrainConfig(method=name, **settings), 0), network


def cosine(one, other):
    return (
        sum(a * b for a, b in zip(one, other, strict=True))
        / math.dist(one, [0] * len(one))
        / math.dist(other, [0] * len(other))
    )


def test_mocos_loss_by_hand_and_its_queue():
    method, _ = method_of("moco", temperature=0.3)
    queue = method.network.contrast.memory_bank.bank.clone()
    generator = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(4, queue.shape[1], generator=generator) for _ in range(2))
    loss = method.loss(torch.cat([queries.requires_grad_(), keys]), None, None)
    expected = []
    for query, key in zip(queries.tolist(), keys.tolist(), strict=True):
        positive = math.exp(cosine(query, key) / 0.3)
        negatives = sum(math.exp(cosine(query, other) / 0.3) for other in queue.tolist())
        expected.append(-math.log(positive / (positive + negatives)))
    assert loss.item() == pytest.approx(sum(expected) / 4, rel=1e-4)
    after = method.network.contrast.memory_bank.bank
    torch.testing.assert_close(after[:4], F.normalize(keys, dim=1))
    assert torch.equal(after[4:], queue[4:])
    assert {"contrast.memory_bank.bank", "contrast.memory_bank.bank_ptr"} <= method.network.state_dict().keys()


def test_byols_loss_by_hand():
    method, _ = method_of("byol")
    rows = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))
    first, second, first_target, second_target = rows.tolist()
    crosswise = [*zip(first, second_target, strict=True), *zip(second, first_target, strict=True)]
    expected = -sum(cosine(*pair) for pair in crosswise) / 6
    assert method.loss(rows.view(12, 8), None, None).item() == pytest.approx(expected, rel=1e-5)


def softmax(values):
    powers = [math.exp(value - max(values)) for value in values]
    return [power / sum(powers) for power in powers]


@pytest.mark.parametrize(("epoch", "temperature"), [(0, 0.02), (1, 0.03), (2, 0.04), (7, 0.04)])
def test_dinos_loss_by_hand_and_its_centre(epoch, temperature):
    warmup = {"teacher_warmup_epochs": 3, "first_teacher_temperature": 0.02}
    method, _ = method_of("dino", dino=DinoConfig(**DINO, **warmup))
    method.begin_epoch(epoch)
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(5, 2, 12, generator=generator)  # two views and a crop of the student, two of the teacher
    centre = torch.randn(12, generator=generator) / 10
    method.network.cross_entropy.center.copy_(centre.view(1, 1, 12))
    loss = method.loss(outputs.view(10, 12), None, None)
    terms = []
    for view in range(2):
        for other in (view_ for view_ in range(3) if view_ != view):
            for tile in range(2):
                teacher = softmax([(t - c) / temperature for t, c in zip(outputs[3 + view, tile], centre, strict=True)])
                student = softmax([value / 0.1 for value in outputs[other, tile].tolist()])
                terms.append(-sum(t * math.log(s) for t, s in zip(teacher, student, strict=True)))
    assert loss.item() == pytest.approx(sum(terms) / len(terms), rel=1e-4)
    moved = 0.9 * centre + 0.1 * outputs[3:].mean((0, 1))
    torch.testing.assert_close(method.network.cross_entropy.center.flatten(), moved)


def test_dinos_spread_is_zero_when_all_tiles_give_the_same_and_one_when_each_gives_its_own():
    method, _ = method_of("dino")
    same = torch.randn(12, generator=torch.Generator().manual_seed(0)).expand(20, 12)
    assert method.spread(same) == pytest.approx(0, abs=1e-3)
    own = torch.cat([torch.randn(12, 12), 10 * torch.eye(12)[:8]])  # the teacher's are the last two of five
    assert method.spread(own) == pytest.approx(1, abs=1e-3)
    method, _ = method_of("dino", dino=DinoConfig(**DINO, teacher_warmup_epochs=2, first_teacher_temperature=1e4))
    assert method.spread(own) == pytest.approx(0, abs=1e-2)  # so hot a teacher says the same of every tile


@pytest.mark.parametrize(("name", "start"), [("moco", 0.999), ("byol", 0.99), ("dino", 0.996)])
def test_the_copy_follows_with_its_momentum(name, start):
    method, _ = method_of(name)
    learner = method.network
    pairs = {"moco": ("queries", "keys"), "byol": ("online", "target"), "dino": ("student", "teacher")}
    leader, copy = (list(getattr(learner, part).parameters()) for part in pairs[name])
    assert not any(parameter.requires_grad for parameter in copy)
    assert all(torch.equal(one, other) for one, other in zip(leader, copy, strict=True))
    before = copy[0].clone()
    with torch.no_grad():
        leader[0].add_(1.0)
    method.update(0, 100)
    torch.testing.assert_close(copy[0] - before, torch.full_like(before, 1 - start), rtol=1e-3, atol=1e-6)
    if name != "moco":
        before = copy[0].clone()
        method.update(99, 100)
        assert torch.equal(copy[0], before)  # still at the end


@pytest.mark.parametrize("name", METHODS.names())
def test_no_gradient_reaches_a_copy_and_every_other_weight_gets_one(name):
    method, _ = method_of(name)
    images = torch.rand(8, 3, 32, 32)
    crops = [torch.rand(4, 3, 32, 32)] if method.crops else []
    _, embeddings = method.network.train()(images, *crops)
    method.loss(embeddings, torch.tensor([0, 1, 1, 0]).repeat(2), None).backward()
    for key, parameter in method.network.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, key


def test_what_is_kept():
    for name in ("simclr", "moco", "byol", "bag_labels"):
        method, network = method_of(name)
        assert method.kept is network
    method, network = method_of("dino")
    assert method.kept.encoder is method.network.teacher.encoder
    assert method.kept.head is network.head


def test_what_collapse_looks_like():
    assert method_of("simclr")[0].contrasted(64) == 128
    assert method_of("moco", queue_size=500)[0].contrasted(64) == 502
    assert method_of("byol")[0].contrasted is None


def test_collapse_without_negatives_is_seen_by_the_spread(small_cohort, tmp_path):
    """Features that do not depend on the tile: the encoder sees a constant."""
    settings = [*SETTINGS, *VIT, "pretrain.method=byol", "pretrain.epochs=6", "encoder.std=[1e9, 1e9, 1e9]"]
    with pytest.raises(TrainingError, match=r"collapsed by epoch 5.*pretrain.momentum_encoder"):
        open_run(tmp_path / "run", small_cohort, "demo", settings, quiet=True).pretrain()


@pytest.mark.parametrize(
    ("name", "encoder"),
    [
        ("simclr", VIT),
        ("moco", RESNET50),
        ("byol", VIT),
        ("dino", []),
        ("dino", [*VIT, *DINO_LONG]),
        ("bag_labels", []),
    ],
)
def test_a_training_that_goes_on_equals_one_that_was_not_stopped(small_cohort, tmp_path, name, encoder):
    settings = [*SETTINGS, f"pretrain.method={name}", "pretrain.check_every=1", "pretrain.check_epochs=2", *encoder]
    whole, stopped, again = (
        open_run(tmp_path / folder, small_cohort, "demo", settings, quiet=True) for folder in ("a", "b", "b")
    )
    whole.pretrain()
    stop_after(stopped.run, "pretrain", 1, stopped.pretrain)
    again.pretrain()
    for checkpoint in ("pretrain", "encoder-start"):
        (one, notes), (other, other_notes) = (
            load_checkpoint(stages.run.checkpoint(checkpoint)) for stages in (whole, again)
        )
        assert notes == other_notes
        assert one.keys() == other.keys()
        assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())
    assert not list(whole.run.path.glob("checkpoints/*best*"))


def test_a_weight_decay_that_ends_where_it_began_is_the_optimisers(small_cohort, tmp_path):
    trained = []
    for number, end in enumerate(("null", 50, 0)):
        settings = [*SETTINGS, *VIT, "pretrain.weight_decay=50", f"pretrain.weight_decay_end={end}"]
        stages = open_run(tmp_path / str(number), small_cohort, "demo", settings, quiet=True)
        stages.pretrain()
        trained.append(load_checkpoint(stages.run.checkpoint("pretrain"))[0]["network.encoder.backbone.pos_embed"])
    by_optimiser, apart, falling = trained
    torch.testing.assert_close(apart, by_optimiser, rtol=1e-2, atol=1e-5)
    assert falling.norm() > 1.02 * apart.norm()


def test_prototypes_are_frozen_in_the_first_epoch_and_trained_afterwards(small_cohort, tmp_path):
    settings = [*SETTINGS, "pretrain.method=dino", *VIT, *DINO_LONG]
    stages = open_run(tmp_path / "run", small_cohort, "demo", settings, quiet=True)
    fresh = prepare(create_network(stages.config), stages.config.pretrain, stages.config.seed).network
    stop_after(stages.run, "pretrain", 1, stages.pretrain)
    states = [fresh.state_dict(), under("network", load_checkpoint(stages.run.checkpoint("pretrain"))[0])]
    open_run(tmp_path / "run", small_cohort, "demo", settings, quiet=True).pretrain()
    states.append(under("network", load_checkpoint(stages.run.checkpoint("pretrain"))[0]))
    for name in ("weight_g", "weight_v"):  # lengths and directions
        start, frozen, trained = (state[f"student.head.last_layer.{name}"] for state in states)
        assert torch.equal(frozen, start), name
        assert not torch.equal(trained, frozen), name
    layers = [state["student.head.layers.0.weight"] for state in states]
    assert not torch.equal(layers[1], layers[0])  # the rest of the head was trained


def checked(cohort, folder, aucs, monkeypatch, *settings):
    """A pretraining whose checks find given numbers; epochs that were checked, and the epoch that was kept."""
    found = iter(aucs)
    monkeypatch.setattr("its2clr.pretrain.validation_checks.Checks._measure", lambda self: next(found))
    stages = open_run(folder, cohort, "demo", [*SETTINGS, "pretrain.epochs=6", *settings], quiet=True)
    stages.pretrain()
    from its2clr.files import read_metrics

    return stages, read_metrics(stages.run.path)


def test_the_best_check_is_kept_and_patience_ends_the_training(small_cohort, tmp_path, monkeypatch):
    patient = ["pretrain.check_every=2"]
    stages, metrics = checked(small_cohort, tmp_path / "a", [0.7, 0.9, 0.8], monkeypatch, *patient)
    assert [entry["epoch"] for entry in metrics if entry["stage"] == "pretrain_check"] == [2, 4, 6]
    assert max(entry["epoch"] for entry in metrics) == 6
    kept = load_checkpoint(stages.run.checkpoint("encoder-start"))[0]
    last = load_checkpoint(stages.run.checkpoint("pretrain"))[0]
    assert not torch.equal(kept["encoder.backbone.conv1.weight"], last["network.encoder.backbone.conv1.weight"])

    short = ["pretrain.check_every=1", "pretrain.patience=2"]
    stopped, metrics = checked(small_cohort, tmp_path / "b", [0.7, 0.9, 0.9, 0.8, 1.0], monkeypatch, *short)
    assert max(entry["epoch"] for entry in metrics if entry["stage"] == "pretrain") == 4
    (stopped.run.path / "state.json").unlink()  # killed before the stage was noted as done
    again = open_run(tmp_path / "b", small_cohort, "demo", [*SETTINGS, "pretrain.epochs=6", *short], quiet=True)
    before = load_checkpoint(stopped.run.checkpoint("pretrain"))[1]
    assert before["notes"]["best_epoch"] == 2
    with pytest.raises(InputError, match="best-encoder-0002"):  # it trains no further, and looks for what it had kept
        again.pretrain()


def test_checks_change_nothing_of_the_training(small_cohort, tmp_path):
    runs = []
    for number, check in enumerate((0, 1)):
        settings = [*SETTINGS, f"pretrain.check_every={check}", "pretrain.check_epochs=1"]
        stages = open_run(tmp_path / str(number), small_cohort, "demo", settings, quiet=True)
        stages.pretrain()
        runs.append(load_checkpoint(stages.run.checkpoint("pretrain"))[0])
    assert all(torch.equal(tensor, runs[1][key]) for key, tensor in runs[0].items())


def test_local_crops_may_be_small_where_the_encoder_takes_them(small_cohort, tmp_path):
    settings = [*SETTINGS, *VIT, "pretrain.method=dino", "pretrain.epochs=1", "pretrain.dino.local_size=16"]
    with pytest.raises(InputError, match="16 x 16 pixels"):
        open_run(tmp_path / "a", small_cohort, "demo", settings, quiet=True).pretrain()
    settings.append("encoder.options.dynamic_img_size=true")
    open_run(tmp_path / "b", small_cohort, "demo", settings, quiet=True).pretrain()


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenetv3_small_050", "vit_tiny_patch16_224"])
def test_encoders_of_many_kinds_give_one_vector_per_tile(name):
    encoder = create_encoder(name, **({"img_size": 32} if name.startswith("vit") else {}))
    check_tile_size(encoder, 32)
    assert encoder.eval()(torch.rand(2, 3, 32, 32)).shape == (2, encoder.feature_dim)


def test_an_encoder_without_pooled_features_is_refused():
    with pytest.raises(InputError, match=r"one feature vector.*global_pool"):
        check_tile_size(create_encoder("resnet18", global_pool=""), 32)


def test_the_learning_rate_rises_from_zero():
    assert warmed_up([1.0, 1.0], 0, 2) == [0.25, 0.5]
    assert warmed_up([1.0, 0.5], 1, 2) == [0.75, 0.5]
    assert warmed_up([1.0, 0.5], 5, 2) == [1.0, 0.5]
    assert warmed_up([0.3, 0.2], 0, 0) == [0.3, 0.2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pretrain.optimiser": "adamw"}, "suits SGD"),
        ({"pretrain.patience": 3}, "set check_every too"),
        ({"pretrain.weight_decay_end": 0.4}, "need optimiser=adamw"),
        ({"pretrain.decay_biases": False}, "need optimiser=adamw"),
        ({"pretrain.warmup_epochs": 99}, "larger than epochs"),
        ({"pretrain.dino.outputs": 3}, "did you mean 'output_dim'"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        resolve_config("demo", settings)

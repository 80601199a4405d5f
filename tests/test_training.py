"""One epoch over batches: what a step trains on, in which order, at which rate, and what it leaves."""

import math

import pytest
import torch
from torch import nn

from its2clr.config import EngineConfig, PretrainConfig, RefineConfig, ViewsConfig
from its2clr.engine.devices import Engine
from its2clr.errors import TrainingError
from its2clr.tile_store import TileStore
from its2clr.training import (
    Batches,
    TrainingStep,
    cosine_or_constant,
    make_optimiser,
    train_epoch,
    warmed_up,
    weight_decays,
)

STILL = ViewsConfig(
    jitter_probability=0, grayscale_probability=0, blur_probability=0, horizontal_flip=0, vertical_flip=0
)


class Mean(nn.Module):
    """Gives the mean of a tile as feature and as embedding, times a weight that starts at one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, images):
        means = images.mean(dim=(1, 2, 3))[:, None]
        return means, self.weight * means


@pytest.fixture
def engine():
    engine = Engine(EngineConfig(accelerator="cpu"))
    engine.bars.enabled = False
    return engine


def tiles(count=12):
    """Tile n is n everywhere."""
    return TileStore(torch.arange(count, dtype=torch.uint8)[:, None, None, None].repeat(1, 3, 4, 4))


def step_with(objective, engine, **settings):
    config = RefineConfig(views=STILL, **settings)
    return TrainingStep(Mean(), tiles(), objective, config, 4, 10, engine)


def test_labels_and_anchors_belong_to_the_tiles_of_both_views(engine):
    """First views first: row i and row B + i are the same tile, and have its label."""
    seen = []

    def objective(embeddings, labels, anchors):
        seen.append(([round(255 * value) for value in embeddings[:, 0].tolist()], labels.tolist(), anchors.tolist()))
        return embeddings.sum() * 0

    indices = torch.tensor([[3, 1, 8, 5], [2, 0, 11, 7]])
    labels = torch.tensor([[1, 0, 0, 1], [0, 0, 1, 0]])
    anchors = torch.tensor([[True, False, True, False], [False, True, True, True]])
    train_epoch(step_with(objective, engine), Batches(indices, labels, anchors), [0.1, 0.1], (0, "refine", 1))
    for number, (rows, of_rows, are_anchors) in enumerate(seen):
        assert rows == indices[number].tolist() * 2
        assert of_rows == [labels[number][indices[number].tolist().index(row)].item() for row in rows]
        assert are_anchors == [anchors[number][indices[number].tolist().index(row)].item() for row in rows]


def test_every_step_has_its_learning_rate(engine):
    """The gradient is one in every step: without momentum the weight falls by the sum of the rates."""
    network_step = step_with(lambda rows, labels, anchors: rows.sum() / rows.detach().sum(), engine, weight_decay=0.0)
    network = network_step.network
    train_epoch(network_step, Batches(torch.tensor([[1, 2, 3, 4]] * 3)), [0.1, 0.02, 0.0], (0, "refine", 1))
    after = next(iter(network.parameters())).item()
    assert after == pytest.approx(1 - 0.1 / 1 - 0.02 / 0.9, abs=1e-6)


def test_an_epoch_says_its_mean_loss_and_calls_back_after_every_step(engine):
    losses = iter([1.0, 2.0, 6.0])
    numbers = []
    step = step_with(lambda rows, labels, anchors: rows.sum() * 0 + next(losses), engine)
    batches = Batches(torch.tensor([[1, 2, 3, 4]] * 3))
    result = train_epoch(step, batches, [0.1] * 3, (0, "refine", 1), numbers.append, lambda rows: float(len(rows)))
    assert result.loss == pytest.approx(3.0)
    assert numbers == [0, 1, 2]
    assert result.spread == 8
    assert result.tiles_per_second == pytest.approx(12 / result.seconds)


def test_a_loss_that_is_no_number_is_said_with_its_stage_and_epoch(engine):
    step = step_with(lambda rows, labels, anchors: rows.sum() * math.nan, engine)
    with pytest.raises(TrainingError, match=r"refine: the loss became nan in epoch 7. Lower refine.learning_rate"):
        train_epoch(step, Batches(torch.tensor([[1, 2, 3, 4]])), [0.1], (0, "refine", 7))


def test_views_of_an_epoch_depend_on_its_keys_alone(engine):
    def first_rows(keys, before=()):
        seen = []

        def objective(rows, labels, anchors):
            seen.append(rows.detach().clone())
            return rows.sum() * 0

        config = RefineConfig(views=ViewsConfig(jitter_probability=1.0))
        step = TrainingStep(Mean(), tiles(), objective, config, 4, 10, engine)
        for other in before:
            train_epoch(step, Batches(torch.tensor([[5, 6, 7, 8]])), [0.0], other)
        train_epoch(step, Batches(torch.tensor([[1, 2, 3, 4]])), [0.0], keys)
        return seen[-1]

    again = first_rows((0, "refine", 2), before=[(0, "refine", 1)])
    assert torch.equal(first_rows((0, "refine", 2)), again)
    assert not torch.equal(first_rows((0, "refine", 3)), again)
    assert not torch.equal(again[:4], again[4:])  # two views


def test_processes_share_out_every_step():
    class OneOf:
        def __init__(self, rank):
            self.rank, self.world_size, self.device = rank, 2, torch.device("cpu")

    batches = Batches(torch.arange(8).view(2, 4), torch.arange(8).view(2, 4) % 2)
    shares = [batches.share(OneOf(rank)) for rank in (0, 1)]
    assert shares[0].indices.tolist() == [[0, 2], [4, 6]]
    assert shares[1].indices.tolist() == [[1, 3], [5, 7]]
    assert shares[1].labels.tolist() == [[1, 1], [1, 1]]
    assert shares[0].anchors is None


def test_the_cosine_falls_from_the_peak_to_zero_after_the_last_step():
    config = RefineConfig(learning_rate=0.4)
    rates = [rate for epoch in range(3) for rate in cosine_or_constant(config, epoch, 3, 4)]
    expected = [0.2 * (1 + math.cos(math.pi * number / 12)) for number in range(12)]
    assert rates == pytest.approx(expected)
    assert rates[0] == 0.4
    assert cosine_or_constant(RefineConfig(learning_rate=0.4, schedule="constant"), 2, 3, 2) == [0.4, 0.4]


def test_constant_epochs_come_before_a_whole_cosine():
    """As in the authors' code, which begins to step its scheduler, made for all epochs, after ten of them."""
    config = RefineConfig(learning_rate=0.4)
    first = [cosine_or_constant(config, epoch, 50, 4, constant_epochs=10)[0] for epoch in range(50)]
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(torch.optim.SGD([torch.zeros(1)], lr=0.4), T_max=50)
    expected = []
    for epoch in range(50):
        expected.append(scheduler.get_last_lr()[0])
        if epoch >= 10:
            scheduler.optimizer.step()
            scheduler.step()
    assert first == pytest.approx(expected)
    assert cosine_or_constant(config, 9, 50, 4, constant_epochs=10) == [0.4] * 4
    assert cosine_or_constant(config, 10, 50, 4, constant_epochs=10) == cosine_or_constant(config, 0, 50, 4)


def test_the_warm_up_rises_to_the_full_rate():
    assert warmed_up([1.0, 1.0], 0, 2) == [0.25, 0.5]
    assert warmed_up([1.0, 1.0], 1, 2) == [0.75, 1.0]
    assert warmed_up([1.0, 1.0], 2, 2) == [1.0, 1.0]
    assert warmed_up([1.0], 0, 0) == [1.0]


def test_what_is_frozen_is_not_trained(engine):
    network = nn.Linear(2, 2)
    network.bias.requires_grad_(False)
    optimiser = make_optimiser(network, RefineConfig(momentum=0.3, weight_decay=0.2), engine)
    (group,) = optimiser.param_groups
    assert group["params"] == [network.weight]
    assert (group["momentum"], group["weight_decay"]) == (0.3, 0.2)


class Line(nn.Module):
    """Gives a matrix times the mean of a tile, plus a bias."""

    def __init__(self):
        super().__init__()
        self.matrix, self.bias = nn.Parameter(torch.tensor([[2.0, -1.0]])), nn.Parameter(torch.tensor([0.5, 3.0]))

    def forward(self, images):
        means = images.mean(dim=(1, 2, 3))[:, None]
        return means, means @ self.matrix + self.bias


ROWS = torch.tensor([[1, 2, 3, 4], [11, 5, 9, 2], [7, 8, 0, 6]])


def cubes(rows, labels=None, anchors=None):
    return rows.pow(3).sum()


def trained_line(engine, rates, decays, **settings):
    config = PretrainConfig(views=STILL, **settings)
    step = TrainingStep(Line(), tiles(), cubes, config, 4, 10, engine)
    train_epoch(step, Batches(ROWS), rates, (0, "pretrain", 1), decays=decays)
    return [parameter.detach() for parameter in step.network.parameters()]


def gradients_by_hand(line, rows):
    means = (rows.repeat(2) / 255)[:, None].expand(-1, 3).reshape(-1, 3, 1, 1).expand(-1, 3, 4, 4)
    return torch.autograd.grad(cubes(line(means)[1]), list(line.parameters()))


@pytest.mark.parametrize("biases", [True, False])
def test_weight_decay_of_every_step_is_that_of_adamw(engine, biases):
    """DINO's code changes the decay of a group of AdamW before every step; biases may be another group."""
    rates, decays = [0.01, 0.005, 0.02], [0.5, 4.0, 9.0]
    settings = {"optimiser": "adamw", "learning_rate": 0.01, "weight_decay_end": 9.0, "decay_biases": biases}
    found = trained_line(engine, rates, decays, **settings)
    line = Line()
    groups = [{"params": [line.matrix]}, {"params": [line.bias]}]
    optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.999))
    for rows, rate, decay in zip(ROWS, rates, decays, strict=True):
        for group, decayed in zip(optimiser.param_groups, (True, biases), strict=True):
            group.update(lr=rate, weight_decay=decay if decayed else 0.0)
        for parameter, gradient in zip(line.parameters(), gradients_by_hand(line, rows), strict=True):
            parameter.grad = gradient
        optimiser.step()
    torch.testing.assert_close(found, [parameter.detach() for parameter in line.parameters()])


def test_each_gradient_is_clipped_by_itself(engine):
    found = trained_line(engine, [0.1] * 3, None, gradient_clip=10, momentum=0.0, weight_decay=0.0)
    line = Line()
    norms = []
    for rows in ROWS:
        for parameter, gradient in zip(line.parameters(), gradients_by_hand(line, rows), strict=True):
            norms.append(gradient.norm().item())
            with torch.no_grad():
                parameter.sub_(0.1 * gradient * min(1.0, 10 / (norms[-1] + 1e-6)))
    assert min(norms) < 10 < max(norms)  # one is clipped while the other is not
    torch.testing.assert_close(found, [parameter.detach() for parameter in line.parameters()])


def test_weight_decay_rises_along_a_cosine_to_its_end_after_the_last_step():
    settings = {"optimiser": "adamw", "learning_rate": 0.001, "weight_decay": 0.04, "epochs": 3}
    config = PretrainConfig(**settings, weight_decay_end=0.4)
    decays = [decay for epoch in range(3) for decay in weight_decays(config, epoch, 4)]
    expected = [0.4 + 0.5 * (0.04 - 0.4) * (1 + math.cos(math.pi * number / 12)) for number in range(12)]
    assert decays == pytest.approx(expected)
    assert decays[0] == pytest.approx(0.04)
    assert decays[-1] < 0.4
    assert weight_decays(PretrainConfig(**settings), 2, 2) == [0.04, 0.04]

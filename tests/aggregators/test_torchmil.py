"""Models of torchmil as aggregators: each one works, or is refused with a reason."""

import inspect

import numpy as np
import pytest
import torch

from its2clr.aggregators import create_aggregator
from its2clr.aggregators.trained import TrainedAggregators
from its2clr.aggregators.training import train_aggregators
from its2clr.bag_features import BagFeatures
from its2clr.config import AggregatorTraining
from its2clr.errors import InputError

torchmil_models = pytest.importorskip("torchmil.models")

from its2clr.aggregators.torchmil_models import PREFIX, torchmil_names  # noqa: E402

FEATURES = 12
SMALL = {
    "torchmil:TransMIL": {"att_dim": 16, "n_heads": 2},
    "torchmil:TransformerABMIL": {"transf_att_dim": 16, "transf_n_heads": 2},
    "torchmil:CLAM_SB": {"k_sample": 2},
}
USABLE = torchmil_names()
ALL = [
    f"{PREFIX}{name}"
    for name, value in vars(torchmil_models).items()
    if inspect.isclass(value) and not name.startswith("MILModel")
]


def bags(seed: int, count: int = 12) -> BagFeatures:
    """Bags of 3 to 9 instances; in positive ones two instances are shifted."""
    generator = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    found = []
    for label in labels:
        bag = generator.normal(size=(int(generator.integers(3, 10)), FEATURES))
        bag[:2] += 3 * label
        found.append(bag)
    return BagFeatures.from_arrays(found, labels)


def test_these_are_usable() -> None:
    wanted = {"ABMIL", "CLAM_SB", "DSMIL", "DTFDMIL", "TransMIL", "TransformerABMIL"}
    assert {name.removeprefix(PREFIX) for name in USABLE} == wanted


@pytest.mark.parametrize("name", [name for name in ALL if name not in USABLE])
def test_others_are_refused_with_a_reason(name: str) -> None:
    with pytest.raises(InputError, match=r"needs (a graph|the places|its own variational|prototypes)|loss needs"):
        create_aggregator(name, FEATURES)


@pytest.mark.parametrize("name", USABLE)
def test_a_bag_gives_the_same_alone_and_padded(name: str) -> None:
    torch.manual_seed(0)
    aggregator = create_aggregator(name, FEATURES, **SMALL.get(name, {})).eval()
    short, long = torch.randn(5, FEATURES), torch.randn(9, FEATURES)
    batch = torch.full((2, 9, FEATURES), torch.nan)
    batch[0, :5], batch[1] = short, long
    mask = torch.tensor([[True] * 5 + [False] * 4, [True] * 9])
    with torch.no_grad():
        together, alone = aggregator(batch, mask), aggregator(short[None])
    torch.testing.assert_close(together.bag_logit[:1], alone.bag_logit)
    torch.testing.assert_close(together.instance_logits[0, :5], alone.instance_logits[0])
    assert torch.isneginf(together.instance_logits[0, 5:]).all()
    if alone.attention is not None:
        assert together.attention is not None
        torch.testing.assert_close(together.attention[0, :5], alone.attention[0])
        torch.testing.assert_close(together.attention.sum(1), torch.ones(2))
        assert (together.attention[0, 5:] == 0).all()


@pytest.mark.parametrize("name", USABLE)
def test_it_learns_is_saved_and_predicts_the_same(name: str, tmp_path) -> None:
    config = AggregatorTraining(
        name=name, options=SMALL.get(name, {}), epochs=12, learning_rate=3e-3, bags_per_step=4, scheduler="constant"
    )
    train, validation = bags(0, 24), bags(1)
    trained = train_aggregators(config, train, validation, [1, 2])
    assert trained.history[-1]["train_loss"][0] < trained.history[0]["train_loss"][0]
    best = int(trained.validation_auc.argmax())
    assert trained.validation_auc[best] > 0.9
    trained.save(tmp_path / "trained.safetensors")
    predictions = trained.predict(validation)
    again = TrainedAggregators.load(tmp_path / "trained.safetensors").predict(validation)
    np.testing.assert_array_equal(predictions.bag_probability, again.bag_probability)
    np.testing.assert_array_equal(predictions.instance_probability, again.instance_probability)
    for module, expected in zip(trained.modules(), predictions.bag_probability, strict=True):
        features, mask = validation.batch(torch.arange(len(validation)))
        with torch.no_grad():
            found = module(features, mask).bag_logit.sigmoid().numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    truth = np.concatenate([np.arange(size) < 2 for size in validation.sizes])
    positive = np.repeat(validation.labels.numpy() == 1, validation.sizes)
    scores = predictions.instance_logit[best]
    assert scores[truth & positive].mean() > scores[~truth & positive].mean() + 0.1


def test_one_seed_is_the_same_among_others() -> None:
    config = AggregatorTraining(name="torchmil:ABMIL", epochs=3, learning_rate=1e-2)
    train, validation = bags(0), bags(1)
    both = train_aggregators(config, train, validation, [5, 6])
    for number, seed in enumerate((5, 6)):
        alone = train_aggregators(config, train, validation, [seed])
        for name, tensor in alone.state.items():
            torch.testing.assert_close(both.state[name][number], tensor[0])


def test_the_loss_is_the_models_own() -> None:
    torch.manual_seed(0)
    aggregator = create_aggregator("torchmil:DSMIL", FEATURES)
    bag, label = torch.randn(1, 6, FEATURES), torch.ones(1)
    _, losses = aggregator.model.compute_loss(label, bag)
    output = aggregator(bag, None, label)
    torch.testing.assert_close(aggregator.loss(output, label), sum(losses.values()))


def test_positive_bags_are_weighted() -> None:
    torch.manual_seed(0)
    aggregator = create_aggregator("torchmil:DSMIL", FEATURES)
    bags, labels = torch.randn(3, 6, FEATURES), torch.tensor([0.0, 1.0, 1.0])
    alone = [aggregator(bag[None], None, label[None]).loss.item() for bag, label in zip(bags, labels, strict=True)]
    aggregator.positive_weight = 4.0
    loss = aggregator.loss(aggregator(bags, None, labels), labels)
    assert loss.item() == pytest.approx((alone[0] + 4 * alone[1] + 4 * alone[2]) / 3, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("torchmil:ABMILL", {}, "did you mean 'ABMIL'.*torchmil has: torchmil:ABMIL"),
        ("torchmil:ABMIL", {"att_dimm": 3}, "unknown option 'att_dimm'.*did you mean 'att_dim'"),
        ("torchmil:ABMIL", {"feat_ext": 3}, "unknown option 'feat_ext'"),
        ("torchmil:ABMIL", {"att_dim": "wide"}, "option 'att_dim'"),
        ("torchmil:DTFDMIL", {"distill_mode": "most"}, "distill_mode"),
    ],
)
def test_wrong_names_and_options_are_said(name: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        create_aggregator(name, FEATURES, **options)


def test_without_torchmil_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchmil", None)
    with pytest.raises(InputError, match=r"pip install 'its2clr\[torchmil\]'"):
        create_aggregator("torchmil:ABMIL", FEATURES)
    assert torchmil_names() == []

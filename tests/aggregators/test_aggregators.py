"""Every aggregator against its slow reference, and the promises all of them make."""

import math

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from its2clr.aggregators import Aggregator, BagOutput, aggregator_names, create_aggregator
from its2clr.aggregators.base import logit_of_mean_probability

from .reference import REFERENCES, dsmil_streams

DIM = 8
SIZES = (1, 7, 4, 11)
VARIANTS = [
    ("max", {}),
    ("top_k", {}),
    ("top_k", {"ratio": 0.5}),
    ("top_k", {"ratio": 1.0}),
    ("smooth_max", {}),
    ("smooth_max", {"sharpness": 3.0, "dropout": 0.5}),
    ("log_mean_exp", {}),
    ("log_mean_exp", {"sharpness": 3.0, "penalty": 0.1}),
    ("attention", {}),
    ("attention", {"gated": True, "hidden_dim": 5}),
    ("attention", {"embedding": [7, 4], "dropout": 0.3}),
    ("instance_attention", {}),
    ("instance_attention", {"gated": True}),
    ("dsmil", {}),
    ("dsmil", {"nonlinear": False, "passing_value": True}),
    ("dsmil", {"prediction": "embedding"}),
    ("transformer", {}),
    ("transformer", {"blocks": 1, "heads": 2, "mlp_ratio": 0.5}),
    ("transformer", {"blocks": 1, "mlp_ratio": 0.5, "layer_norm": False}),
]
variants = pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)


def build(name: str, options: dict, seed: int = 0) -> Aggregator:
    """An aggregator in double precision with parameters large enough to tell instances apart."""
    torch.manual_seed(seed)
    aggregator = create_aggregator(name, DIM, **options).double().eval()
    with torch.no_grad():
        for parameter in aggregator.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.7)
        for buffer in aggregator.buffers():
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    return aggregator


def ragged_bags(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, DIM, generator=generator, dtype=torch.float64) for size in SIZES]


def pad(bags: list[Tensor], fill: float = 0.0, extra: int = 0) -> tuple[Tensor, Tensor]:
    length = max(map(len, bags)) + extra
    features = torch.full((len(bags), length, DIM), fill, dtype=bags[0].dtype)
    mask = torch.zeros(len(bags), length, dtype=torch.bool)
    for index, bag in enumerate(bags):
        features[index, : len(bag)] = bag
        mask[index, : len(bag)] = True
    return features, mask


def test_every_registered_aggregator_is_tested_here():
    assert {name for name, _ in VARIANTS} == set(REFERENCES) == set(aggregator_names())


@variants
def test_equals_slow_reference(name: str, options: dict):
    aggregator = build(name, options)
    bags = ragged_bags()
    output = aggregator(*pad(bags))
    assert isinstance(output, BagOutput)
    for index, bag in enumerate(bags):
        probability, logits, weights = REFERENCES[name](aggregator.state_dict(), bag.tolist(), options)
        assert torch.sigmoid(output.bag_logit[index]).item() == pytest.approx(probability, rel=1e-9)
        assert output.instance_logits[index, : len(bag)].tolist() == pytest.approx(logits, rel=1e-9)
        if weights is None:
            assert output.attention is None
        else:
            assert output.attention[index, : len(bag)].tolist() == pytest.approx(weights, rel=1e-9)


@pytest.mark.parametrize("fill", [0.0, 1e9, math.inf, math.nan])
@variants
def test_alone_equals_padded_in_a_batch(name: str, options: dict, fill: float):
    aggregator = build(name, options)
    bags = ragged_bags()
    labels = torch.tensor([1.0, 0.0, 1.0, 0.0])
    features, mask = pad(bags, fill, extra=3)
    features.requires_grad_()
    output = aggregator(features, mask)
    aggregator.loss(output, labels).backward()
    gradients = {key: parameter.grad.clone() for key, parameter in aggregator.named_parameters()}
    aggregator.zero_grad()

    assert (output.instance_logits[~mask] == -math.inf).all()
    if output.attention is not None:
        assert (output.attention[~mask] == 0).all()
    assert (features.grad[~mask] == 0).all()
    for index, bag in enumerate(bags):
        alone = bag[None].clone().requires_grad_()
        single = aggregator(alone)
        torch.testing.assert_close(single.bag_logit[0], output.bag_logit[index])
        torch.testing.assert_close(single.instance_logits[0], output.instance_logits[index, : len(bag)])
        if single.attention is not None:
            torch.testing.assert_close(single.attention[0], output.attention[index, : len(bag)])
            assert single.attention.sum().item() == pytest.approx(1)
        (aggregator.loss(single, labels[index : index + 1]) / len(bags)).backward()
        torch.testing.assert_close(alone.grad[0], features.grad[index, : len(bag)])
    for key, parameter in aggregator.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[key])


@variants
def test_padding_is_never_chosen_over_real_instances(name: str, options: dict):
    """Instances that a classifier scores far below a row of zeros, which is what padding is: it must not win."""
    aggregator = build(name, options)
    classifiers = [
        module for key, module in aggregator.named_modules() if key.endswith("classifier") and module.in_features == DIM
    ]
    generator = torch.Generator().manual_seed(0)
    for trial in range(50):
        bag = torch.randn(1 + trial % 4, DIM, generator=generator, dtype=torch.float64)
        if classifiers:  # project the instances onto where the classifier gives its bias less 3 to 6
            weight = classifiers[trial % len(classifiers)].weight[0].detach()
            wanted = -3 - 3 * torch.rand(len(bag), generator=generator, dtype=torch.float64)
            bag += ((wanted - bag @ weight) / weight.square().sum())[:, None] * weight
        front, behind = trial % 3, 3
        features = torch.full((1, front + len(bag) + behind, DIM), math.nan, dtype=torch.float64)
        features[0, front : front + len(bag)] = bag
        mask = torch.zeros(features.shape[:2], dtype=torch.bool)
        mask[0, front : front + len(bag)] = True
        alone, padded = aggregator(bag[None]), aggregator(features, mask)
        torch.testing.assert_close(padded.bag_logit, alone.bag_logit)
        torch.testing.assert_close(padded.instance_logits[mask], alone.instance_logits[0])
        if alone.attention is not None:
            torch.testing.assert_close(padded.attention[mask], alone.attention[0])


@variants
def test_order_of_instances_does_not_matter(name: str, options: dict):
    aggregator = build(name, options)
    bag = ragged_bags()[3]
    permutation = torch.randperm(len(bag), generator=torch.Generator().manual_seed(1))
    straight, shuffled = aggregator(bag[None]), aggregator(bag[permutation][None])
    torch.testing.assert_close(straight.bag_logit, shuffled.bag_logit)
    torch.testing.assert_close(straight.instance_logits[:, permutation], shuffled.instance_logits)


@variants
def test_gradient_reaches_the_features_and_every_parameter(name: str, options: dict):
    aggregator = build(name, options)
    features, mask = pad(ragged_bags())
    features.requires_grad_()
    aggregator.loss(aggregator(features, mask), torch.tensor([1, 0, 1, 0])).backward()
    assert (features.grad.abs().sum(dim=(1, 2)) > 0).all()
    for key, parameter in aggregator.named_parameters():
        assert parameter.grad.abs().sum() > 0, key


@variants
def test_vmap_over_seeds_equals_each_alone(name: str, options: dict):
    aggregators = [build(name, options, seed) for seed in range(3)]
    inputs = [pad(ragged_bags(seed), math.nan) for seed in range(3)]
    labels = torch.tensor([1, 0, 1, 0])
    parameters, buffers = stack_module_state(aggregators)

    def single(state: dict, features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        output = functional_call(aggregators[0], state, (features, mask))
        return output.bag_logit, output.instance_logits, aggregators[0].loss(output, labels)

    features, mask = (torch.stack(parts) for parts in zip(*inputs, strict=True))
    state = {**parameters, **buffers}
    bag_logits, instance_logits, losses = vmap(single, randomness="different")(state, features, mask)
    losses.sum().backward()
    for index, (aggregator, (features, mask)) in enumerate(zip(aggregators, inputs, strict=True)):
        output = aggregator(features, mask)
        torch.testing.assert_close(bag_logits[index], output.bag_logit)
        torch.testing.assert_close(instance_logits[index], output.instance_logits)
        aggregator.loss(output, labels).backward()
        for key, parameter in aggregator.named_parameters():
            torch.testing.assert_close(parameters[key].grad[index], parameter.grad)


@pytest.mark.parametrize("labels", [torch.tensor([1, 0, 0, 1]), torch.tensor([1.0, 0.0, 0.0, 1.0])])
@pytest.mark.parametrize("name", ["max", "top_k", "smooth_max", "attention", "instance_attention", "transformer"])
def test_loss_is_cross_entropy_of_the_bag(name: str, labels: Tensor):
    aggregator = build(name, {})
    output = aggregator(*pad(ragged_bags()))
    probabilities = torch.sigmoid(output.bag_logit).tolist()
    expected = [-math.log(p if y else 1 - p) for p, y in zip(probabilities, labels.tolist(), strict=True)]
    assert aggregator.loss(output, labels).item() == pytest.approx(sum(expected) / 4, rel=1e-7)


@pytest.mark.parametrize("prediction", ["mean", "embedding"])
@pytest.mark.parametrize("loss_weight", [0.0, 0.1, 1.0, 5.0])
def test_dsmil_loss_weighs_its_two_streams(loss_weight: float, prediction: str):
    aggregator = build("dsmil", {"loss_weight": loss_weight, "prediction": prediction})
    bags = ragged_bags()
    expected = 0.0
    for bag, label in zip(bags, (1, 0, 0, 1), strict=True):
        embedding, maximum, _, _ = dsmil_streams(aggregator.state_dict(), bag.tolist(), {})
        sign = 1 if label else -1
        losses = [math.log(1 + math.exp(-sign * logit)) for logit in (embedding, maximum)]
        expected += (losses[0] + loss_weight * losses[1]) / (1 + loss_weight) / len(bags)
    loss = aggregator.loss(aggregator(*pad(bags)), torch.tensor([1, 0, 0, 1]))
    assert loss.item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("weight", [0.25, 1.0, 3.0])
@variants
def test_a_positive_bag_counts_as_often_in_the_loss_as_set(name: str, options: dict, weight: float):
    """Each bag alone, unweighted; then the sum in which positive ones count `weight` times, over the number of bags."""
    aggregator = build(name, options)
    bags, labels = ragged_bags(), torch.tensor([1, 0, 0, 1])
    alone = [
        aggregator.loss(aggregator(bag[None]), label[None]).item() for bag, label in zip(bags, labels, strict=True)
    ]
    expected = (weight * alone[0] + alone[1] + alone[2] + weight * alone[3]) / 4
    aggregator.positive_weight = weight
    assert aggregator.loss(aggregator(*pad(bags)), labels).item() == pytest.approx(expected, rel=1e-9)


def test_the_weighted_loss_is_that_of_torch():
    """In the libraries' words: the positive weight of the binary cross-entropy."""
    aggregator = build("max", {})
    output, labels = aggregator(*pad(ragged_bags())), torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    aggregator.positive_weight = 1.7
    torch.testing.assert_close(
        aggregator.loss(output, labels),
        torch.nn.functional.binary_cross_entropy_with_logits(
            output.bag_logit, labels, pos_weight=torch.tensor(1.7, dtype=torch.float64)
        ),
    )


@pytest.mark.parametrize(("ratio", "size", "count"), [(0.1, 30, 3), (0.1, 31, 4), (0.001, 500, 1), (0.2, 5, 1)])
def test_top_k_counts_instances_of_each_bag_exactly(ratio: float, size: int, count: int):
    aggregator = create_aggregator("top_k", DIM, ratio=ratio)
    bag = torch.randn(size, DIM, generator=torch.Generator().manual_seed(0)).requires_grad_()
    features = torch.cat([bag, torch.zeros(200, DIM)])[None]
    mask = (torch.arange(size + 200) < size)[None]
    aggregator(features, mask).bag_logit.sum().backward()
    assert (bag.grad.abs().sum(dim=1) > 0).sum() == count


def test_logit_of_mean_probability_does_not_saturate():
    logits = torch.tensor([[120.0, 110.0], [-120.0, -110.0]])
    mean = logit_of_mean_probability(logits, torch.full((2, 2), 0.5).log())
    tail = -math.log(0.5 * math.exp(-120) + 0.5 * math.exp(-110))
    assert mean.tolist() == pytest.approx([tail, -tail])


@pytest.mark.parametrize("name", ["attention", "instance_attention", "dsmil", "transformer"])
def test_dropout_works_in_training_only(name: str):
    aggregator = build(name, {"dropout": 0.5})
    features, mask = pad(ragged_bags())
    torch.testing.assert_close(aggregator(features, mask).bag_logit, build(name, {})(features, mask).bag_logit)
    aggregator.train()
    assert not torch.allclose(aggregator(features, mask).bag_logit, aggregator(features, mask).bag_logit)

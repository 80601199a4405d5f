import math

import pytest
import torch

from its2clr.losses.supcon import supervised_contrastive_loss


def slow_loss(embeddings, labels, anchors, temperature):
    """Equation 2 with loops; float64 throughout."""
    rows = [[float(v) for v in row] for row in embeddings]
    norms = [math.sqrt(sum(v * v for v in row)) for row in rows]
    unit = [[v / n for v in row] for row, n in zip(rows, norms, strict=True)]

    def log_sim(a, b):
        return sum(p * q for p, q in zip(unit[a], unit[b], strict=True)) / temperature

    losses = []
    for x in anchors:
        same = [k for k in range(len(rows)) if k != x and labels[k] == labels[x]]
        different = [k for k in range(len(rows)) if labels[k] != labels[x]]
        if not same:
            continue
        terms = [log_sim(x, k) for k in same + different]
        top = max(terms)
        log_denominator = top + math.log(sum(math.exp(t - top) for t in terms))
        losses.append(sum(log_denominator - log_sim(x, s) for s in same) / len(same))
    return sum(losses) / len(losses) if losses else 0.0


@pytest.mark.parametrize("count", [2, 5, 16])
@pytest.mark.parametrize("classes", [1, 2, 4])
@pytest.mark.parametrize("temperature", [0.01, 0.07, 1.0])
def test_equals_the_slow_reference(count, classes, temperature):
    generator = torch.Generator().manual_seed(count * 10 + classes)
    embeddings = torch.randn(count, 7, generator=generator, dtype=torch.float64)
    labels = torch.randint(classes, (count,), generator=generator)
    anchors = torch.rand(count, generator=generator) < 0.6
    expected = slow_loss(embeddings, labels.tolist(), anchors.nonzero().flatten().tolist(), temperature)
    found = supervised_contrastive_loss(embeddings, labels, anchors, temperature)
    assert found.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    by_index = supervised_contrastive_loss(embeddings, labels, anchors.nonzero().flatten(), temperature)
    assert by_index.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_all_rows_are_anchors_by_default():
    embeddings, labels = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 0, 1, 1, 1, 2])
    expected = slow_loss(embeddings, labels.tolist(), range(6), 0.3)
    assert supervised_contrastive_loss(embeddings, labels, None, 0.3).item() == pytest.approx(expected)


def test_anchors_without_a_same_set_are_left_out_of_the_mean():
    embeddings, labels = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 0, 1, 2])
    assert supervised_contrastive_loss(embeddings, labels, None, 0.5).item() == pytest.approx(
        slow_loss(embeddings, labels.tolist(), [0, 1], 0.5)
    )


def test_no_anchor_at_all_is_zero_with_zero_gradient():
    embeddings = torch.randn(3, 4, requires_grad=True)
    loss = supervised_contrastive_loss(embeddings, torch.tensor([0, 1, 2]), None, 0.1)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(embeddings.grad, torch.zeros_like(embeddings))


@pytest.mark.parametrize("temperature", [1e-4, 1e-2, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_finite_for_any_temperature_with_gradients(temperature, dtype):
    embeddings = (torch.randn(32, 8) * 50).to(dtype).requires_grad_()
    loss = supervised_contrastive_loss(embeddings, torch.arange(32) % 2, None, temperature)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(embeddings.grad).all()


def test_scale_of_the_rows_does_not_matter():
    embeddings, labels = torch.randn(8, 5), torch.arange(8) % 2
    scaled = embeddings * torch.rand(8, 1).add(0.5)
    one, other = (supervised_contrastive_loss(e, labels, None, 0.2) for e in (embeddings, scaled))
    assert one.item() == pytest.approx(other.item(), rel=1e-5)


def test_collapsed_embeddings_give_log_of_the_other_rows():
    loss = supervised_contrastive_loss(torch.ones(10, 4), torch.arange(10) % 2, None, 0.07)
    assert loss.item() == pytest.approx(math.log(9), rel=1e-5)


def test_gradient_equals_finite_differences():
    embeddings = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    labels, anchors = torch.tensor([0, 0, 1, 1, 0]), torch.tensor([True, False, True, True, True])
    assert torch.autograd.gradcheck(lambda e: supervised_contrastive_loss(e, labels, anchors, 0.3), (embeddings,))


@pytest.mark.parametrize(
    ("labels", "anchors", "temperature", "message"),
    [
        (torch.zeros(3), None, 0.1, "labels"),
        (torch.zeros(4), torch.ones(3, dtype=torch.bool), 0.1, "anchor mask"),
        (torch.zeros(4), None, 0.0, "temperature"),
    ],
)
def test_wrong_arguments_are_named(labels, anchors, temperature, message):
    with pytest.raises(ValueError, match=message):
        supervised_contrastive_loss(torch.randn(4, 2), labels, anchors, temperature)

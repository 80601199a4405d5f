import pytest
import torch
from lightly.loss import NTXentLoss

from its2clr.pretrain.loop import epoch_indices
from its2clr.pretrain.simclr import simclr_objective


@pytest.mark.parametrize("count", [2, 7, 32])
@pytest.mark.parametrize("temperature", [0.05, 0.2, 0.5, 1.0])
def test_equals_lightly_with_its_gradients(count, temperature):
    embeddings = torch.randn(2 * count, 9, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    gradients = []
    losses = []
    for objective in (
        lambda rows: simclr_objective(temperature)(rows, None, None),
        lambda rows: NTXentLoss(temperature)(*rows.chunk(2)),
    ):
        rows = embeddings.clone().requires_grad_()
        loss = objective(rows)
        loss.backward()
        losses.append(loss.item())
        gradients.append(rows.grad)
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    torch.testing.assert_close(*gradients)


def test_an_epoch_of_a_small_cohort_goes_through_its_tiles_again():
    once, longer = epoch_indices(70, 16, 0, 3), epoch_indices(70, 16, 0, 3, steps=10)
    assert once.shape == (4, 16)
    assert longer.shape == (10, 16)
    assert torch.equal(longer[:4], once)
    assert all(len(set(batch.tolist())) == 16 for batch in longer)
    assert not torch.equal(longer[4:8], once)

import pytest
import torch
from lightly.loss import NTXentLoss

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

"""The fused kernel against the plain operations; without a GPU in Triton's interpreter, in a process of its own."""

import os
import subprocess
import sys

import pytest
import torch

from its2clr.config import ViewsConfig
from its2clr.views.drawn import draw
from its2clr.views.plain import apply

CASES = {
    "everything": {"crop_scale": (0.2, 1.0), "quarter_turn": 0.5},
    "refinement": {},
    "colours": {"jitter_probability": 1.0, "blur_probability": 0.0, "grayscale_probability": 0.0},
    "blur": {"jitter_probability": 0.0, "blur_probability": 1.0, "blur_kernel": 0.3},
    "nothing": {
        "jitter_probability": 0.0, "blur_probability": 0.0, "grayscale_probability": 0.0, "horizontal_flip": 0.0,
        "vertical_flip": 0.0,
    },
}  # fmt: skip


def compare(device: str, side: int = 24) -> None:
    from its2clr.views.fused import fused_views

    generator = torch.Generator().manual_seed(0)
    tiles = torch.randint(0, 256, (7, 3, side, side), dtype=torch.uint8, generator=generator)
    tiles[0] = 0  # black: no hue
    tiles[1] = 255
    tiles[2] = tiles[2, :1]  # gray
    tiles = tiles.to(device)
    rows = torch.tensor([3, 0, 6, 1, 2, 5, 4, 6, 3, 3, 2, 5] * 2, device=device)
    for name, settings in CASES.items():
        drawn = draw(
            ViewsConfig(**settings), len(rows), side, torch.Generator(device).manual_seed(1), torch.device(device)
        )
        assert len(drawn.order.unique(dim=0)) > 5
        expected = apply(tiles[rows], drawn)
        found = fused_views(tiles, rows, drawn)
        assert found.is_contiguous(memory_format=torch.channels_last)
        # a view knows to about 1e-7 of the side where it looks, and neighbouring pixels here differ by up to 1
        torch.testing.assert_close(
            found, expected, rtol=0, atol=1e-6 * side, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.slow
def test_fused_views_equal_the_plain_ones():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        compare("cuda", 224)
        return
    code = "from tests.test_fused_views import compare; compare('cpu')"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=300)


def test_every_view_has_its_own_order_when_none_is_given():
    drawn = draw(ViewsConfig(), 2000, 32, torch.Generator().manual_seed(0), torch.device("cpu"))
    assert drawn.order.shape == (2000, 4)
    assert (drawn.order.sort(1).values == torch.arange(4)).all()
    _, counts = drawn.order.unique(dim=0, return_counts=True)
    assert len(counts) == 24
    assert counts.min() > 40

import pytest
import torch
import torchvision.transforms.v2.functional as reference

from its2clr.config import ViewsConfig
from its2clr.views import drawn, plain
from its2clr.views.maker import ViewMaker

OFF = {
    "jitter_probability": 0.0,
    "grayscale_probability": 0.0,
    "blur_probability": 0.0,
    "horizontal_flip": 0.0,
    "vertical_flip": 0.0,
}


@pytest.fixture
def images():
    return torch.rand(9, 3, 24, 24, generator=torch.Generator().manual_seed(0))


def make(images, seed=0, **settings):
    return ViewMaker(ViewsConfig(**(OFF | settings)), torch.device("cpu"), seed)(images)


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_colour_factors_equal_torchvision(images, name):
    factors = torch.linspace(0.2, 1.8, len(images))
    operation = getattr(reference, f"adjust_{name}")
    expected = torch.stack([operation(image, float(f)) for image, f in zip(images, factors, strict=True)])
    assert torch.allclose(getattr(plain, f"adjust_{name}")(images, factors), expected, atol=1e-6)


def test_hue_equals_torchvision(images):
    images = torch.cat([images, torch.zeros(1, 3, 24, 24), torch.full((1, 3, 24, 24), 0.5)])  # black, gray
    shifts = torch.linspace(-0.5, 0.5, len(images))
    expected = torch.stack([reference.adjust_hue(i, float(s)) for i, s in zip(images, shifts, strict=True)])
    assert torch.allclose(plain.adjust_hue(images, shifts), expected, atol=1e-5)


def test_grayscale_equals_torchvision(images):
    assert torch.allclose(plain.grayscale(images), reference.rgb_to_grayscale(images), atol=1e-6)


def test_blur_equals_torchvision(images):
    sigmas = torch.linspace(0.1, 2.0, len(images))
    expected = torch.stack(
        [reference.gaussian_blur(i, [5, 5], [float(s)] * 2) for i, s in zip(images, sigmas, strict=True)]
    )
    assert torch.allclose(plain.gaussian_blur(images, sigmas, 5), expected, atol=1e-5)


@pytest.mark.parametrize("box", [(0, 0, 24, 24), (4, 6, 12, 18), (12, 0, 12, 8)])
def test_crop_equals_torchvision(images, box):
    expected = reference.resized_crop(images, *box, size=[24, 24], antialias=False)
    parts = [torch.full((len(images),), value / 24) for value in box]
    # Beyond the box torchvision repeats its edge; grid_sample looks at the pixel outside. Compare the inside.
    found = plain.resized_crop(images, *parts)
    inside = slice(2, -2)
    assert torch.allclose(found[..., inside, inside], expected[..., inside, inside], atol=1e-4)


@pytest.mark.parametrize(("side", "kernel"), [(224, 13), (96, 5), (32, 1), (64, 3)])
def test_blur_kernel_is_the_papers_share_of_the_side(side, kernel):
    assert drawn.blur_kernel_size(0.06, side) == kernel


def test_every_tile_has_its_own_draw_and_stays_in_range():
    same = torch.rand(3, 32, 32).expand(16, -1, -1, -1)
    made = ViewMaker(ViewsConfig(crop_scale=(0.3, 1.0)), torch.device("cpu"), 3)(same)
    assert made.min() >= 0
    assert made.max() <= 1
    assert len({tuple(view.flatten()[:50].tolist()) for view in made}) > 12


def test_same_keys_same_views_and_other_keys_others(images):
    settings = {"jitter_probability": 0.8, "crop_scale": (0.5, 1.0)}
    assert torch.equal(make(images, 1, **settings), make(images, 1, **settings))
    assert not torch.equal(make(images, 1, **settings), make(images, 2, **settings))


def test_uint8_and_float_tiles_give_the_same_views():
    tiles = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    assert torch.allclose(make(tiles, jitter_probability=1.0), make(tiles / 255, jitter_probability=1.0))


def test_nothing_switched_on_changes_nothing(images):
    assert torch.equal(make(images), images)


def test_quarter_turns_and_flips_give_all_eight_orientations(images):
    image = images[:1].expand(400, -1, -1, -1)
    views = make(image, horizontal_flip=0.5, vertical_flip=0.5, quarter_turn=0.5)
    turned = [image[0].rot90(k, (1, 2)) for k in range(4)]
    orientations = [*turned, *(one.flip(-1) for one in turned)]
    counts = [sum(torch.equal(view, one) for view in views) for one in orientations]
    assert sum(counts) == 400
    assert min(counts) > 25


@pytest.mark.parametrize(("setting", "axis"), [("horizontal_flip", -1), ("vertical_flip", -2)])
def test_flips(images, setting, axis):
    assert torch.equal(make(images, **{setting: 1.0}), images.flip(axis))


@pytest.mark.parametrize(
    ("setting", "share"),
    [("horizontal_flip", 0.5), ("grayscale_probability", 0.2), ("jitter_probability", 0.8)],
)
def test_happens_in_the_wanted_share(setting, share):
    tiles = torch.rand(2000, 3, 4, 4)
    difference = (make(tiles, **{setting: share}) - tiles).abs().flatten(1).amax(1)
    changed = (difference > 1e-4).float().mean().item()  # turning hue by nothing rounds
    assert changed == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize("name", ["brightness", "saturation"])
def test_factors_are_uniform_in_the_papers_range(name, monkeypatch):
    seen = []
    monkeypatch.setitem(plain.OPERATIONS, name, lambda images, factor: (seen.append(factor), images)[1])
    make(torch.rand(4000, 3, 2, 2), jitter_probability=1.0)
    factors = seen[0]
    assert factors.min() == pytest.approx(0.2, abs=0.01)
    assert factors.max() == pytest.approx(1.8, abs=0.01)
    assert factors.mean() == pytest.approx(1.0, abs=0.03)


def test_crops_are_small_parts_at_any_size():
    """Tiles that brighten from left to right: a crop of a part spans that part of the range."""
    ramp = torch.linspace(0, 255, 32).to(torch.uint8).expand(3, 3, 32, 32)
    maker = ViewMaker(ViewsConfig(**OFF, crop_ratio=(1.0, 1.0)), torch.device("cpu"), 1)
    crops = maker.crops(ramp, torch.tensor([2, 0]), 3, (0.25, 0.25), 16)
    assert crops.shape == (6, 3, 16, 16)
    span = crops.amax((1, 2, 3)) - crops.amin((1, 2, 3))
    assert ((span > 0.4) & (span < 0.5)).all()  # half of the side
    assert len({round(float(crop.amin()), 4) for crop in crops}) > 1  # each its own part
    assert maker.crops(ramp, torch.tensor([1]), 2, (0.25, 0.25), None).shape == (2, 3, 32, 32)

import pytest
import torch
import torchvision.transforms.v2.functional as reference
from torchvision.transforms import RandomResizedCrop

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


def boxes_of(scale, ratio, side, count):
    """Boxes (4, count) in pixels as they are drawn here, and by torchvision: top, left, height, width."""
    config = ViewsConfig(crop_scale=scale, crop_ratio=ratio)
    shares = drawn.draw(config, count, side, torch.Generator().manual_seed(0), torch.device("cpu")).numbers[:4]
    here = (shares * side).round()
    torch.testing.assert_close(here / side, shares)  # whole pixels
    with torch.random.fork_rng():
        torch.manual_seed(1)
        there = [RandomResizedCrop.get_params(torch.empty(3, side, side), scale, ratio) for _ in range(count)]
    return here, torch.tensor(there, dtype=torch.float32).T


def largest_difference(one, other):
    """Of the shares of values up to a point, over all points (Kolmogorov and Smirnov)."""
    points = torch.cat([one, other]).sort().values
    shares = [torch.searchsorted(values.sort().values, points, right=True) / len(values) for values in (one, other)]
    return (shares[0] - shares[1]).abs().max().item()


@pytest.mark.parametrize(
    ("scale", "ratio", "side"),
    [
        ((0.08, 1.0), (3 / 4, 4 / 3), 224),
        ((0.4, 1.0), (3 / 4, 4 / 3), 32),
        ((0.05, 0.4), (0.5, 2.0), 64),
        ((0.9, 1.0), (0.5, 2.0), 224),  # seldom fits at once
    ],
)
def test_crops_are_drawn_as_torchvision_draws_them(scale, ratio, side):
    count = 3000
    here, there = boxes_of(scale, ratio, side, count)
    assert (here[:2] + here[2:]).max() <= side
    area, aspect = ([how(boxes[2], boxes[3]) for boxes in (here, there)] for how in (torch.mul, torch.div))
    for one, other in (area, aspect, *zip(here, there, strict=True)):
        assert one.mean().item() == pytest.approx(other.mean().item(), abs=5 * other.std().item() * (2 / count) ** 0.5)
        assert largest_difference(one, other) < 0.05  # by chance it is larger in one of a thousand comparisons


@pytest.mark.parametrize(
    ("ratio", "box"), [((2.0, 3.0), [8, 0, 16, 32]), ((0.3, 0.6), [0, 6, 32, 19]), ((0.9, 1.1), [0, 0, 32, 32])]
)
def test_a_crop_that_never_fits_is_the_middle_as_in_torchvision(ratio, box):
    """Of the boxes with the whole tile's area only its own shape fits."""
    for boxes in boxes_of((1.0, 1.0), ratio, 32, 50):
        assert boxes.T.tolist() == [box] * 50


def test_crops_change_no_other_draw():
    settings = {"quarter_turn": 0.5}
    plain_views, cropped = (
        drawn.draw(
            ViewsConfig(**settings, crop_scale=scale), 50, 32, torch.Generator().manual_seed(0), torch.device("cpu")
        )
        for scale in (None, (0.08, 1.0))
    )
    assert torch.equal(plain_views.numbers[4:], cropped.numbers[4:])
    assert torch.equal(plain_views.order, cropped.order)
    assert torch.equal(plain_views.sigma, cropped.sigma)


@pytest.mark.parametrize(("side", "kernel"), [(224, 13), (96, 5), (32, 1), (64, 3), (112, 7), (16, 0)])
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

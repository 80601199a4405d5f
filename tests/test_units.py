"""Conversions between the pixels of a tile, those of level 0, microns and magnifications."""

import doctest

import pytest

from its2clr import units


def test_examples() -> None:
    assert doctest.testmod(units).failed == 0
    assert doctest.testmod(units).attempted == 2


@pytest.mark.parametrize(("magnification", "mpp"), [(40, 0.25), (20, 0.5), (10, 1), (5, 2)])
def test_magnification_and_scale_are_two_words_for_one_thing(magnification: float, mpp: float) -> None:
    assert units.mpp_of_magnification(magnification) == mpp
    assert units.magnification_of(mpp) == magnification
    assert units.magnification_of(256 * mpp, pixels=256) == magnification


@pytest.mark.parametrize(
    ("pixels", "mpp", "mpp_level0", "expected"),
    [(224, 2.0, 0.5, 896), (224, 0.5, 0.5, 224), (224, 1.0, 0.2527, 886), (1, 0.1, 10.0, 1)],
)
def test_a_length_at_level_0(pixels: int, mpp: float, mpp_level0: float, expected: int) -> None:
    assert units.to_level0(pixels, mpp, mpp_level0) == expected


def test_the_scale_of_a_tile_and_of_level_0() -> None:
    """224 stored pixels cover 448 of level 0: a stored pixel is twice as wide."""
    assert units.tile_mpp(0.25, 224, 448) == 0.5
    assert units.level0_mpp(0.5, 224, 448) == 0.25
    assert units.level0_magnification(20, 224, 448) == 40


@pytest.mark.parametrize(("step", "side", "expected"), [(64, 64, 0), (48, 64, 8), (32, 64, 16), (80, 64, 0)])
def test_pixels_that_neighbours_share(step: float, side: float, expected: int) -> None:
    assert units.shared_pixels(32, step, side) == expected

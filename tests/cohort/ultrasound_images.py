"""Artificial ultrasound images: a speckled scan, and around it what a scanner draws."""

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from scipy import ndimage

SIZE = (480, 360)


def fan(x, y, inner, outer, degrees, size=SIZE):
    """A fan: its apex at x, y above the image or in it, and the arcs of probe and depth."""
    columns, rows = np.meshgrid(np.arange(size[0]) - x, np.arange(size[1]) - y)
    distance = np.hypot(columns, rows)
    within = np.abs(np.arctan2(columns, rows)) <= np.radians(degrees / 2)
    return within & (inner <= distance) & (distance <= outer)


def rectangle(left, top, right, bottom, size=SIZE):
    """What a linear probe scans."""
    scan = np.zeros(size[::-1], dtype=bool)
    scan[top:bottom, left:right] = True
    return scan


def speckle(shape, seed=0, level=90.0):
    """Grey tissue that darkens with depth, with a bright layer: Rayleigh speckle of a few pixels."""
    rng = np.random.default_rng(seed)
    parts = [ndimage.gaussian_filter(rng.normal(size=shape), (1.0, 1.6)) for _ in range(2)]
    depth = np.linspace(1.2, 0.5, shape[0])[:, None]
    layer = 1 + 0.8 * np.exp(-(((np.arange(shape[0]) / shape[0] - 0.3) / 0.05) ** 2))[:, None]
    amplitude = np.hypot(*parts) / np.hypot(*parts).mean()
    return np.clip(level * depth * layer * amplitude, 0, 255).astype(np.uint8)


def frame(size=SIZE, background=0):
    """Text, a ruler, a wedge of greys, a logo and coloured marks, for any scan between them."""
    width, height = size
    image = Image.new("RGB", size, (background,) * 3)
    drawing = ImageDraw.Draw(image)
    white, font = (235, 235, 235), ImageFont.load_default(max(10, height // 30))
    for row, text in enumerate(["CLINIC OF X", "DOE, JANE 0123", "12L-RS 9 MHz", "Gen  Gn 54", "DR 66", "RT 10:00"]):
        drawing.text((4, 4 + row * height // 22), text, white, font)
    drawing.text((width * 0.4, 2), "MI 0.9  TIs 0.1  2021-09-24", white, font)
    drawing.text((width * 0.35, height - height // 24), "RT BREAST 10 O'CLOCK  DIST 1.2 cm", white, font)
    drawing.line([(width - 14, 20), (width - 14, height - 20)], white, 2)
    for y in range(20, height - 20, height // 30):
        drawing.line([(width - 22, y), (width - 14, y)], white, 1)
    for row in range(height // 3):
        drawing.line([(8, height // 2 + row), (18, height // 2 + row)], (255 - row * 2 % 256,) * 3)
    drawing.rounded_rectangle([width - 70, 3, width - 28, 18], 4, (120, 120, 130))
    drawing.ellipse([width - 66, 5, width - 54, 16], (30, 90, 220))
    drawing.text((4, height - 40), "Freq", (250, 220, 40), font)
    return image


def draw(scan, seed=0, holes=(), background=0, level=90.0):
    """A frame with a scan in it; holes are dark ellipses (x, y, radius across, radius down), such as shadows."""
    size = scan.shape[::-1]
    image = frame(size, background)
    tissue = speckle(scan.shape, seed, level)
    columns, rows = np.meshgrid(*map(np.arange, size))
    for x, y, across, down in holes:
        tissue[((columns - x) / across) ** 2 + ((rows - y) / down) ** 2 <= 1] = 0
    image.paste(Image.fromarray(tissue).convert("RGB"), mask=Image.fromarray(scan))
    drawing = ImageDraw.Draw(image)
    left = int(np.flatnonzero(scan.any(axis=0))[0])
    drawing.polygon([(left - 9, 120), (left - 9, 132), (left + 1, 126)], (40, 220, 60))  # a coloured mark at its edge
    return image

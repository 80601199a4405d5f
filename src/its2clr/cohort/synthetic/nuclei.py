"""Nuclei of the synthetic slides: how those of each tissue look, where they lie, and how they are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from its2clr.cohort.synthetic.drawing import TissueSettings

Floats = NDArray[np.float32]
Generator = np.random.Generator


class NucleusKind(NamedTuple):
    """How the nuclei of one tissue look; lengths in microns, spreads as standard deviations."""

    spacing: float
    radius: float
    radius_spread: float  # of the logarithm
    aspect: float  # long axis over short axis
    irregularity: float  # of the outline, relative to the radius
    stain: float  # haematoxylin concentration
    stain_spread: float
    coarseness: float  # contrast of the chromatin clumps
    pallor: float  # how much paler the centre is than the rim
    nucleolus: float  # extra haematoxylin of the nucleolus


STROMA_NUCLEI = NucleusKind(15.0, 2.2, 0.18, 3.0, 0.04, 0.95, 0.12, 0.10, 0.0, 0.0)
LYMPHOID_NUCLEI = NucleusKind(6.6, 2.5, 0.10, 1.10, 0.04, 1.15, 0.10, 0.12, 0.0, 0.0)
ADIPOSE_NUCLEI = NucleusKind(7.0, 1.7, 0.15, 2.6, 0.04, 1.00, 0.10, 0.10, 0.0, 0.0)
GLANDULAR_NUCLEI = NucleusKind(4.7, 2.6, 0.12, 1.45, 0.05, 0.90, 0.10, 0.15, 0.15, 0.05)
RESTING_NUCLEI = NucleusKind(9.0, 2.8, 0.12, 1.25, 0.05, 0.95, 0.10, 0.15, 0.10, 0.0)
ENLARGED_NUCLEI = NucleusKind(11.0, 4.3, 0.14, 1.30, 0.06, 0.85, 0.10, 0.20, 0.30, 0.15)
TUMOUR_NUCLEI = NucleusKind(14.0, 6.6, 0.26, 1.40, 0.18, 1.30, 0.20, 0.34, 0.25, 0.70)

OUTLINE_HARMONICS = (2, 3, 4, 5)
NUCLEUS = np.dtype(
    [(name, np.float32) for name in NucleusKind._fields if name not in {"spacing", "radius_spread", "stain_spread"}]
    + [(name, np.float32) for name in ("y", "x", "angle", "nucleolus_y", "nucleolus_x")]
    + [("outline", np.complex64, (len(OUTLINE_HARMONICS),))]
)
Nuclei = NDArray[np.void]


def lerp(start: NucleusKind, end: NucleusKind, amount: float) -> NucleusKind:
    """A kind between two others: the first at amount 0, the second at 1."""
    return NucleusKind(*(a + amount * (b - a) for a, b in zip(start, end, strict=True)))


def at(field: NDArray[Any], nuclei: Nuclei) -> NDArray[Any]:
    """The field's value at the centre of each nucleus; off the picture, at the nearest pixel."""
    y = np.clip(np.rint(nuclei["y"]).astype(int), 0, field.shape[0] - 1)
    x = np.clip(np.rint(nuclei["x"]).astype(int), 0, field.shape[1] - 1)
    return np.asarray(field[y, x])


def thin(rng: Generator, nuclei: Nuclei, keep: Floats) -> Nuclei:
    """Keep each nucleus with the probability found at its place."""
    return nuclei[rng.random(len(nuclei)) < at(keep, nuclei)]


def scatter(rng: Generator, kind: NucleusKind, shape: tuple[int, int], settings: TissueSettings) -> Nuclei:
    """Nuclei of one kind on a jittered hexagonal lattice over the whole picture."""
    spacing = kind.spacing / settings.mpp / np.sqrt(settings.nuclei_density)
    height = spacing * np.sqrt(3) / 2
    row, column = np.mgrid[0 : int(shape[0] / height) + 2, 0 : int(shape[1] / spacing) + 2]
    origin = rng.uniform(-1, 0, 2)
    y = (row.ravel() + origin[0]) * height
    x = (column.ravel() + 0.5 * (row.ravel() % 2) + origin[1]) * spacing
    shift = rng.normal(0, 0.17 * spacing, (2, y.size))
    return _nuclei(rng, kind, y + shift[0], x + shift[1], settings)


def rings(rng: Generator, centres: Floats, gland_radius: Floats, settings: TissueSettings) -> Nuclei:
    """Nuclei along the rim of each gland, long axis towards its centre."""
    scale = 1.0 / settings.mpp
    y, x, angle = [], [], []
    for (centre_y, centre_x), rim in zip(centres, gland_radius, strict=True):
        radius = rim - 3.2 * scale
        count = max(6, round(2 * np.pi * radius / (GLANDULAR_NUCLEI.spacing * scale) * settings.nuclei_density))
        turn = (np.arange(count) + rng.normal(0, 0.12, count) + rng.random()) * (2 * np.pi / count)
        away = radius + rng.normal(0, 0.5 * scale, count)
        y.append(centre_y + away * np.sin(turn))
        x.append(centre_x + away * np.cos(turn))
        angle.append(turn)
    nuclei = _nuclei(rng, GLANDULAR_NUCLEI, np.concatenate(y), np.concatenate(x), settings)
    nuclei["angle"] = np.concatenate(angle)
    return nuclei


def _nuclei(rng: Generator, kind: NucleusKind, y: Floats, x: Floats, settings: TissueSettings) -> Nuclei:
    """Draw the looks of nuclei of one kind at the given places."""
    count = len(y)
    nuclei = np.zeros(count, NUCLEUS)
    nuclei["y"], nuclei["x"] = y, x
    spread = np.clip(rng.standard_normal(count), -2, 2)
    nuclei["radius"] = kind.radius / settings.mpp * np.exp(kind.radius_spread * spread)
    nuclei["aspect"] = 1 + (kind.aspect - 1) * rng.uniform(0.5, 1.5, count)
    nuclei["angle"] = rng.uniform(0, np.pi, count)
    nuclei["irregularity"] = kind.irregularity
    nuclei["stain"] = kind.stain * np.exp(np.clip(rng.standard_normal(count), -2, 2) * kind.stain_spread)
    nuclei["coarseness"] = kind.coarseness
    nuclei["pallor"] = kind.pallor
    nuclei["nucleolus"] = kind.nucleolus * rng.uniform(0.5, 1.3, count)
    away = nuclei["radius"] * rng.uniform(0, 0.4, count)
    turn = rng.uniform(0, 2 * np.pi, count)
    nuclei["nucleolus_y"], nuclei["nucleolus_x"] = away * np.sin(turn), away * np.cos(turn)
    harmonics = np.asarray(OUTLINE_HARMONICS)
    waves = rng.standard_normal((count, len(harmonics), 2)) * (1.6 / harmonics)[:, None]
    nuclei["outline"] = kind.irregularity * (waves[..., 0] + 1j * waves[..., 1]) / np.sqrt(2)
    return nuclei


def stamp(nuclei: Nuclei, clumps: Floats, scale: float, batch: int = 256) -> Floats:
    """(H, W) haematoxylin of the nuclei; where they overlap the darker one shows.

    Nuclei are drawn many at once in square windows of one size; sorting them by size keeps the windows tight.
    """
    long_axis = nuclei["radius"] * np.sqrt(nuclei["aspect"])
    reach = long_axis * (1 + 1.2 * np.abs(nuclei["outline"]).sum(axis=1)).clip(1, 1.6) + 1.5
    order = np.argsort(reach, kind="stable")
    margin = int(np.ceil(reach.max(initial=1.0))) * 2 + 2
    canvas = np.zeros((clumps.shape[0] + 2 * margin, clumps.shape[1] + 2 * margin), np.float32)
    clumps = np.pad(clumps, margin, mode="reflect")
    for start in range(0, len(order), batch):
        some = nuclei[order[start : start + batch]]
        half = int(np.ceil(reach[order[start : start + batch]].max()))
        rows, cols, stain = _draw(some, half, clumps, margin, scale)
        np.maximum.at(canvas, (rows, cols), stain)
    return canvas[margin:-margin, margin:-margin]


def _draw(
    nuclei: Nuclei, half: int, clumps: Floats, margin: int, scale: float
) -> tuple[NDArray[np.intp], NDArray[np.intp], Floats]:
    """Canvas rows (n, k, 1), columns (n, 1, k) and haematoxylin (n, k, k) of nuclei; k = 2 half + 1."""

    def column(name: str) -> Floats:
        return np.asarray(nuclei[name], np.float32)[:, None, None]

    steps = np.arange(-half, half + 1)
    # A centre far off the picture would leave the canvas; unseen, it may as well lie nearer.
    limit_y, limit_x = (side - half - 1 for side in clumps.shape)
    centre_y = np.clip(np.rint(column("y")).astype(np.intp) + margin, half, limit_y)
    centre_x = np.clip(np.rint(column("x")).astype(np.intp) + margin, half, limit_x)
    rows, cols = centre_y + steps[:, None], centre_x + steps
    dy = (rows - margin - column("y")).astype(np.float32)
    dx = (cols - margin - column("x")).astype(np.float32)
    cos, sin, stretch = np.cos(column("angle")), np.sin(column("angle")), np.sqrt(column("aspect"))
    along, aside = (cos * dx + sin * dy) / stretch, (cos * dy - sin * dx) * stretch
    distance = np.hypot(along, aside) + np.float32(1e-3)
    turn = (along + 1j * aside) / distance  # e^(i angle) on the outline

    wave = np.zeros_like(distance)
    power = turn
    for index, harmonic in enumerate(OUTLINE_HARMONICS):
        power = power * turn if index else turn**harmonic
        wave += (nuclei["outline"][:, index, None, None] * power).real
    edge = column("radius") * np.clip(1 + wave, 0.55, 1.6)
    cover = np.clip(edge - distance + 0.5, 0, 1)
    depth = 1 - np.minimum(1, distance / edge) ** 2
    stain = column("stain") * (1 - column("pallor") * depth) * (1 + column("coarseness") * clumps[rows, cols])
    spot = (dy - column("nucleolus_y")) ** 2 + (dx - column("nucleolus_x")) ** 2
    stain = stain + column("nucleolus") * np.exp(-0.5 * spot / np.float32(max(0.9 * scale, 0.7) ** 2))
    return rows, cols, np.asarray(cover * np.clip(stain, 0.15, 2.2), np.float32)

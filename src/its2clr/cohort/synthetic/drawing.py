"""Draws procedural tissue that looks like an H&E cartoon, with known positive (tumour) tiles.

A slide is one continuous picture of `rows x cols` tiles. Five kinds of negative tissue share it, laid out by
smooth random fields; one of them, the reactive kind, mimics tumour. Every slide, positive or negative, also has
foci painted over that layout on whole tiles: of tumour in a positive slide, of reactive tissue in a negative
one. Drawn from the same generator, the two are the same picture but for the nuclei of the foci, and the very
same picture at `evidence` 0: neither stain, nor layout, nor the edge of a focus can give the bag label away.

Pictures are composed in optical density (Beer-Lambert, Ruifrok and Johnston 2001): every pixel holds a
concentration of haematoxylin and of eosin, and the image is `white * exp(-(c_H * H + c_E * E))`.
All lengths are microns; `mpp` turns them into pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from scipy import ndimage

from its2clr.cohort.synthetic.nuclei import (
    ADIPOSE_NUCLEI,
    ENLARGED_NUCLEI,
    LYMPHOID_NUCLEI,
    RESTING_NUCLEI,
    STROMA_NUCLEI,
    TUMOUR_NUCLEI,
    Floats,
    Generator,
    Nuclei,
    NucleusKind,
    at,
    lerp,
    rings,
    scatter,
    stamp,
    thin,
)
from its2clr.units import MicronsPerPixel, TilePixels

STROMA, LYMPHOID, ADIPOSE, GLANDULAR, REACTIVE, TUMOUR = range(6)
TISSUE_NAMES = ("stroma", "lymphoid", "adipose", "glandular", "reactive", "tumour")


class TissueSettings(BaseModel):
    """What a synthetic slide shows and how hard it is to read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tile_size: TilePixels = Field(TilePixels(32), ge=16, le=1024, description="side of a tile in pixels")
    grid: tuple[int, int] = Field((7, 7), description="rows and columns of tiles in a slide")
    mpp: MicronsPerPixel = Field(
        MicronsPerPixel(1.0), gt=0, description="microns per pixel; structures have fixed sizes in microns"
    )
    evidence: float = Field(
        0.95,
        ge=0,
        le=1,
        description="how far tumour nuclei depart from reactive ones: 0 draws them alike, 1 is plain to see",
    )
    mimic_strength: float = Field(
        0.2,
        ge=0,
        le=1,
        description="how far reactive (negative) nuclei resemble tumour in size: 0 not at all, 1 as large",
    )
    witness_rate: float = Field(
        0.10,
        gt=0,
        le=0.5,
        description="mean share of tumour tiles in positive slides (never less than one tile)",
    )
    nuclei_density: float = Field(1.0, gt=0.2, le=2, description="factor on the nuclei per area of every tissue")
    stain_variation: float = Field(
        1.0, ge=0, le=3, description="spread of stain, brightness, white balance and sharpness between slides"
    )

    @model_validator(mode="after")
    def _check_geometry(self) -> TissueSettings:
        if min(self.grid) < 1 or self.grid[0] * self.grid[1] < 2:
            raise ValueError(f"grid must hold at least two tiles, got {self.grid[0]} x {self.grid[1]}")
        if self.tile_size * self.mpp < 16:
            raise ValueError(
                f"a tile of {self.tile_size} px at {self.mpp} microns per pixel is "
                f"{self.tile_size * self.mpp:g} microns wide; nuclei need at least 16"
            )
        return self


@dataclass(frozen=True)
class Slide:
    """A rendered slide and its ground truth."""

    image: NDArray[np.uint8]  # (rows * tile_size, cols * tile_size, 3)
    labels: NDArray[np.int8]  # (rows, cols), 1 where at least half of the tile is tumour
    tissue: NDArray[np.uint8]  # (rows * tile_size, cols * tile_size), index into TISSUE_NAMES


TUMOUR_CYTOPLASM = 0.25
"""Haematoxylin that tumour cytoplasm has over reactive cytoplasm."""

HAEMATOXYLIN = np.array([0.65, 0.70, 0.29])
EOSIN = np.array([0.07, 0.99, 0.11])


def render_slide(rng: Generator, settings: TissueSettings, positive: bool) -> Slide:
    """Draw one slide; the same generator state and settings always give the same picture.

    Args:
        rng: Generator that has a seed sequence (`np.random.default_rng(...)`); it is spawned from.
        settings: What to draw.
        positive: Whether the foci are tumour; if not, they are reactive tissue.

    Returns:
        The picture, the labels of its tiles and the kind of tissue at every pixel.
    """
    layout_rng, texture_rng, nuclei_rng, stain_rng, focus_rng = rng.spawn(5)
    rows, cols = settings.grid
    shape = (rows * settings.tile_size, cols * settings.tile_size)
    scale = 1.0 / settings.mpp  # pixels per micron

    regions = _layout(layout_rng, shape, scale)
    tissue = np.argmax(regions, axis=0).astype(np.uint8)

    reactive = lerp(RESTING_NUCLEI, ENLARGED_NUCLEI, settings.mimic_strength * layout_rng.uniform(0.5, 1.0))
    malignant = lerp(reactive, TUMOUR_NUCLEI, settings.evidence)
    fibres, direction = _fibres(texture_rng, shape, scale)
    haematoxylin, eosin, nuclei = _negative_tissue(
        texture_rng,
        nuclei_rng,
        regions=regions,
        fibres=fibres,
        direction=direction,
        reactive=reactive,
        settings=settings,
    )

    focus_tiles = choose_focus_tiles(focus_rng, settings)
    focus = _focus_mask(focus_rng, focus_tiles, settings)
    inside = focus > 0.5
    tissue[inside] = TUMOUR if positive else REACTIVE
    ground_h, ground_e, cells = _cellular_tissue(
        focus_rng, malignant if positive else reactive, settings.evidence if positive else 0.0, fibres, settings
    )
    haematoxylin += focus * (ground_h - haematoxylin)
    eosin += focus * (ground_e - eosin)
    # A nucleus belongs to the tile that holds its centre; off the border, most of it lies there.
    core = ndimage.binary_erosion(inside, iterations=max(1, round(2 * scale)), border_value=1)
    nuclei = np.concatenate([nuclei[~at(inside, nuclei)], cells[at(core, cells)]])

    clumps = smooth_noise(texture_rng, shape, max(0.8, 0.8 * scale))
    chromatin = stamp(nuclei, clumps, scale)
    eosin *= 1.0 - 0.6 * np.minimum(1.0, chromatin / 0.5)
    haematoxylin = np.maximum(haematoxylin, chromatin)
    image = _stain(stain_rng, haematoxylin, eosin, settings.stain_variation, scale)
    labels = focus_tiles if positive else np.zeros_like(focus_tiles)
    return Slide(image=image, labels=labels, tissue=tissue)


def choose_focus_tiles(rng: Generator, settings: TissueSettings) -> NDArray[np.int8]:
    """Choose the tiles of a slide's foci: one to three compact, 4-connected blobs.

    The share of tiles is beta distributed between one tile and 2.5 times the witness rate, with the witness
    rate as its mean (one tile where the witness rate asks for less).

    Returns:
        (rows, cols) array, 1 in the foci.
    """
    rows, cols = settings.grid
    total = rows * cols
    low, high = 1 / total, min(0.9, max(2.5 * settings.witness_rate, 2 / total))
    mean = np.clip((settings.witness_rate - low) / (high - low), 0.0, 1.0)
    share = low + (high - low) * (rng.beta(3 * mean, 3 * (1 - mean)) if 0 < mean < 1 else mean)
    count = max(1, int(share * total + rng.random()))  # stochastic rounding keeps the mean
    blobs = min(count, int(rng.integers(1, 4)))
    sizes = 1 + rng.multinomial(count - blobs, np.full(blobs, 1 / blobs))

    labels = np.zeros((rows, cols), np.int8)
    cross = ndimage.generate_binary_structure(2, 1).astype(np.int8)
    for size in sizes:
        blob = np.zeros_like(labels)
        free = np.flatnonzero(labels == 0)
        blob.flat[rng.choice(free)] = 1
        for _ in range(size - 1):
            # Tiles with more neighbours in the blob are likelier: compact, yet ragged.
            neighbours = ndimage.convolve(blob, cross, mode="constant").astype(np.float64)
            weight = np.where((labels == 0) & (blob == 0), neighbours**2, 0.0)
            if weight.sum() == 0:
                break
            blob.flat[rng.choice(total, p=(weight / weight.sum()).ravel())] = 1
        labels |= blob
    return labels


def smooth_noise(rng: Generator, shape: tuple[int, int], sigma: float) -> Floats:
    """Gaussian random field, of unit variance at every pixel and correlated over about `sigma` pixels.

    White noise on a coarse grid, spread by Gaussian bumps along one axis, then the other. Each pixel sums the
    few knots near it: the cost does not grow with `sigma`, and no BLAS threads disturb other workers.
    """
    taps = 8

    def knots(length: int) -> tuple[NDArray[np.intp], Floats]:
        """The first of the knots that matter to each pixel, and the weights of all of them (length, taps)."""
        place = np.arange(length) / sigma
        first = np.floor(place).astype(np.intp)
        weights = np.exp(-0.5 * (place[:, None] - first[:, None] - np.arange(taps) + (taps / 2 - 1)) ** 2)
        return first, np.asarray(weights / np.linalg.norm(weights, axis=1, keepdims=True), np.float32)

    (first_row, down), (first_column, across) = knots(shape[0]), knots(shape[1])
    white = rng.standard_normal((first_row[-1] + taps, first_column[-1] + taps), dtype=np.float32)
    rows = sum(down[:, tap, None] * white[first_row + tap] for tap in range(taps))
    rows = np.asarray(rows).T.copy()  # so that the second pass, too, gathers whole rows
    columns = sum(across[:, tap, None] * rows[first_column + tap] for tap in range(taps))
    return np.ascontiguousarray(np.asarray(columns, np.float32).T)


def _layout(rng: Generator, shape: tuple[int, int], scale: float) -> Floats:
    """(5, H, W) weights of the negative kinds; slides differ in how much they hold of each."""
    prevalence = np.array([0.25, 0.2, -0.6, 0.05, 0.25])
    share = prevalence + rng.normal(0.0, 0.45, len(prevalence))
    fields = np.stack([smooth_noise(rng, shape, 26 * scale) + bias for bias in share])
    sharp = np.exp(9.0 * (fields - fields.max(axis=0)))
    return np.asarray(sharp / sharp.sum(axis=0), np.float32)


def _focus_mask(rng: Generator, focus_tiles: NDArray[np.int8], settings: TissueSettings) -> Floats:
    """(H, W) share of the foci at every pixel: their tiles, the edges a little wavy and soft."""
    scale = 1.0 / settings.mpp
    mask = np.kron(focus_tiles, np.ones((settings.tile_size, settings.tile_size), np.float32))
    soft = ndimage.gaussian_filter(mask, 1.5 * scale, mode="nearest")
    wave = 0.12 * np.clip(smooth_noise(rng, mask.shape, 4 * scale), -2, 2)
    return np.asarray(np.clip((soft - 0.5) * 2.0 + 0.5 + wave * (4 * soft * (1 - soft)), 0.0, 1.0), np.float32)


class _Cells(NamedTuple):
    """Worley noise: which of a set of scattered centres is nearest to each pixel."""

    centres: Floats  # (n, 2)
    owner: NDArray[np.intp]  # (H, W)
    nearest: Floats  # (H, W) distance to the owner
    second: Floats  # (H, W) distance to the next nearest


def _worley(rng: Generator, shape: tuple[int, int], spacing: float, jitter: float) -> _Cells:
    rows, cols = (int(np.ceil(side / spacing)) + 2 for side in shape)
    index_y, index_x = np.mgrid[0:rows, 0:cols]
    offset = rng.uniform(-jitter, jitter, (2, rows, cols))
    centre_y = ((index_y - 0.5 + offset[0]) * spacing).astype(np.float32)
    centre_x = ((index_x - 0.5 + offset[1]) * spacing).astype(np.float32)

    y = np.arange(shape[0], dtype=np.float32)[:, None]
    x = np.arange(shape[1], dtype=np.float32)[None, :]
    cell_y = (y // spacing).astype(int) + 1
    cell_x = (x // spacing).astype(int) + 1
    nearest = np.full(shape, np.inf, np.float32)
    second = np.full(shape, np.inf, np.float32)
    owner = np.zeros(shape, np.intp)
    for step_y in (-1, 0, 1):
        for step_x in (-1, 0, 1):
            near = np.clip(cell_y + step_y, 0, rows - 1), np.clip(cell_x + step_x, 0, cols - 1)
            squared = (centre_y[near] - y) ** 2 + (centre_x[near] - x) ** 2
            closer = squared < nearest
            second = np.where(closer, nearest, np.where(squared > nearest, np.minimum(second, squared), second))
            owner = np.where(closer, near[0] * cols + near[1], owner)
            nearest = np.where(closer, squared, nearest)
    centres = np.stack([centre_y.ravel(), centre_x.ravel()], axis=1)
    return _Cells(centres, owner, np.sqrt(nearest), np.sqrt(second))


def _negative_tissue(
    texture_rng: Generator,
    nuclei_rng: Generator,
    *,
    regions: Floats,
    fibres: Floats,
    direction: float,
    reactive: NucleusKind,
    settings: TissueSettings,
) -> tuple[Floats, Floats, Nuclei]:
    """Haematoxylin and eosin of everything but nuclei, and the nuclei, of the five negative kinds."""
    scale = 1.0 / settings.mpp
    shape = fibres.shape[0], fibres.shape[1]
    haematoxylin = np.empty(regions.shape, np.float32)
    eosin = np.empty(regions.shape, np.float32)
    stroma_rng, lymphoid_rng, adipose_rng, gland_rng, reactive_rng = nuclei_rng.spawn(5)

    haematoxylin[STROMA], eosin[STROMA] = 0.05, fibres
    fibroblasts = scatter(stroma_rng, STROMA_NUCLEI, shape, settings)
    fibroblasts["angle"] = direction + stroma_rng.normal(0, 0.25, len(fibroblasts))
    stroma = np.concatenate([fibroblasts, _lymphocytes(stroma_rng, 0.05, 1.3, shape, settings)])

    haematoxylin[LYMPHOID], eosin[LYMPHOID] = 0.15, 0.34
    lymphoid = scatter(lymphoid_rng, LYMPHOID_NUCLEI, shape, settings)

    fat = _worley(texture_rng, shape, 19 * scale, 0.3)
    wall = np.clip(1.6 - (fat.second - fat.nearest) / (1.3 * scale), 0, 1)
    haematoxylin[ADIPOSE], eosin[ADIPOSE] = 0.01 + 0.05 * wall, 0.03 + 0.40 * wall
    adipose = scatter(adipose_rng, ADIPOSE_NUCLEI, shape, settings)
    adipose = adipose[at(wall > 0.5, adipose)]

    glands = _worley(texture_rng, shape, 34 * scale, 0.16)
    gland_radius = scale * texture_rng.normal(13.5, 1.5, len(glands.centres)).astype(np.float32)
    secretion = texture_rng.uniform(0.02, 0.4, len(glands.centres)).astype(np.float32)
    depth = gland_radius[glands.owner] - glands.nearest  # from the gland's rim inwards
    epithelium = np.clip(depth / scale + 0.5, 0, 1)
    lumen = np.clip((depth - 8.0 * scale) / scale, 0, 1)
    haematoxylin[GLANDULAR] = (1 - lumen) * (0.05 + 0.12 * epithelium) + 0.01
    eosin[GLANDULAR] = (1 - lumen) * (0.32 * epithelium + (1 - epithelium) * 0.9 * fibres) + lumen * secretion[
        glands.owner
    ]
    glandular = rings(gland_rng, glands.centres, gland_radius, settings)

    haematoxylin[REACTIVE], eosin[REACTIVE], cells = _cellular_tissue(reactive_rng, reactive, 0.0, fibres, settings)

    tissue = np.argmax(regions, axis=0)
    nuclei = np.concatenate(
        [some[at(tissue == kind, some)] for kind, some in enumerate((stroma, lymphoid, adipose, glandular, cells))]
    )
    return (regions * haematoxylin).sum(axis=0), (regions * eosin).sum(axis=0), nuclei


def _fibres(rng: Generator, shape: tuple[int, int], scale: float) -> tuple[Floats, float]:
    """Eosin of wavy collagen and the direction it runs in, in radians."""
    direction = float(rng.uniform(0, np.pi))
    y, x = np.mgrid[0 : shape[0], 0 : shape[1]].astype(np.float32) / np.float32(scale)
    across = x * -np.sin(direction) + y * np.cos(direction)
    across = across + 2.5 * smooth_noise(rng, shape, 12 * scale)
    strands = np.sin(across * (2 * np.pi / 5.5)) + 0.6 * np.sin(across * (2 * np.pi / 3.1) + 1.0)
    strands = strands * (0.6 + 0.4 * smooth_noise(rng, shape, 8 * scale))
    return np.clip(0.46 + 0.10 * strands + 0.05 * smooth_noise(rng, shape, 10 * scale), 0.05, 1), direction


def _cellular_tissue(
    rng: Generator, kind: NucleusKind, malignancy: float, fibres: Floats, settings: TissueSettings
) -> tuple[Floats, Floats, Nuclei]:
    """Haematoxylin, eosin and nuclei of reactive tissue (malignancy 0) and of tumour (up to 1).

    Cells lie in cytoplasm or, where the tissue is loose, further apart between the fibres of the stroma, so
    that the colour of a tile ranges from that of stroma to that of lymphoid tissue. Tumour grows as a solid
    sheet: less stroma between its cells, fewer lymphocytes, bluer cytoplasm.
    """
    scale = 1.0 / settings.mpp
    shape = fibres.shape[0], fibres.shape[1]
    compact = 1 / (1 + np.exp(-2 * (rng.normal(0, 0.7) + smooth_noise(rng, shape, 14 * scale))))
    compact += malignancy * (1 - compact)
    mottle = smooth_noise(rng, shape, 3 * scale)
    haematoxylin = 0.05 + compact * np.clip(0.09 + TUMOUR_CYTOPLASM * malignancy + 0.03 * mottle, 0, 1)
    eosin = fibres + compact * (np.clip(0.36 + 0.06 * mottle, 0, 1) - fibres)
    gap = np.clip(3 * (smooth_noise(rng, shape, 4 * scale) - rng.uniform(1.1, 2.2)), 0, 1)  # pale clefts
    cells = thin(rng, scatter(rng, kind, shape, settings), 0.8 + 0.2 * compact)
    nuclei = np.concatenate([cells, _lymphocytes(rng, 0.12 * (1 - malignancy), 0.9, shape, settings)])
    return haematoxylin * (1 - gap), eosin * (1 - 0.9 * gap), nuclei


def _lymphocytes(
    rng: Generator, share: float, patchiness: float, shape: tuple[int, int], settings: TissueSettings
) -> Nuclei:
    """Lymphocytes strewn in patches through another tissue, at a median `share` of their packed density."""
    patches = share * np.exp(patchiness * smooth_noise(rng, shape, 12 / settings.mpp))
    return thin(rng, scatter(rng, LYMPHOID_NUCLEI, shape, settings), patches)


def _stain(rng: Generator, haematoxylin: Floats, eosin: Floats, variation: float, scale: float) -> NDArray[np.uint8]:
    """Turn concentrations into the picture a scanner would give, with this slide's own stain and optics."""
    vectors = np.stack([HAEMATOXYLIN, EOSIN]) + variation * rng.normal(0, 0.035, (2, 3))
    vectors = np.maximum(vectors, 0.01)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    amount = np.exp(variation * np.clip(rng.normal(0, 0.14, 2), -0.35, 0.35))
    white = 243 * np.exp(variation * (rng.normal(0, 0.015) + rng.normal(0, 0.008, 3)))
    blur = scale * 0.45 * np.exp(variation * rng.normal(0, 0.15))
    noise = 2.2 * np.exp(variation * rng.normal(0, 0.25))

    vectors = vectors.astype(np.float32)
    density = (amount[0] * haematoxylin)[..., None] * vectors[0] + (amount[1] * eosin)[..., None] * vectors[1]
    density = ndimage.gaussian_filter(density.astype(np.float32), (blur, blur, 0), mode="nearest")
    image = white.astype(np.float32) * np.exp(-1.15 * density)
    image += np.float32(noise) * rng.standard_normal(image.shape, dtype=np.float32)
    return np.asarray(np.clip(np.rint(image), 0, 255), np.uint8)

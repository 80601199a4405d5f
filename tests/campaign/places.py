"""What every part works with: small cohorts, slides, features, a finished run; made once."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from tests.campaign.machine import its2clr
from tests.cohort.feature_files import grid, trident
from tests.cohort.slide_files import draw, write_pyramid
from tests.conftest import TINY

SHORT = [
    *TINY,
    "aggregator.epochs=2",
    "refine.epochs=3",
    "refine.refresh_every=1",
    "refine.batch_size=32",
    "pretrain.batch_size=32",
    "evaluation={retrainings: 2, bootstrap: 20}",
]
"""Settings that make a whole run a matter of seconds, with everything in it."""
SPLITS = ("train", "val", "test")


def settings() -> list[str]:
    """As words of the command line."""
    return ["--recipe", "demo", *(part for override in SHORT for part in ("--set", override))]


@dataclass(frozen=True)
class Places:
    """Where things are.

    Attributes:
        root: The folder of the campaign.
    """

    root: Path

    @property
    def cohort(self) -> Path:
        """A cohort of drawn bags, with labels of instances."""
        return self.root / "base" / "cohort"

    @property
    def run(self) -> Path:
        """A finished, evaluated run on it."""
        return self.root / "base" / "run"

    @property
    def images(self) -> Path:
        """A manifest of folders of images."""
        return self.root / "base" / "images" / "bags.csv"

    @property
    def slides(self) -> Path:
        """A manifest of slides."""
        return self.root / "base" / "slides" / "slides.csv"

    @property
    def features(self) -> Path:
        """A manifest of feature files, beside them."""
        return self.root / "base" / "features" / "bags.csv"

    @property
    def feature_cohort(self) -> Path:
        """A cohort of them."""
        return self.root / "base" / "feature-cohort"

    def new(self, name: str) -> Path:
        """An empty folder."""
        folder = self.root / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder


def make(root: Path) -> Places:
    """Make the inputs, and a finished run."""
    places = Places(root)
    base = places.new("base")
    _must(["cohort", "synthetic", places.cohort, "--size", "tiny", "--workers", "1"], base)
    _must(["fit", places.cohort, "--out", places.run, *settings()], base)
    _write_images(places.images)
    _write_slides(places.slides)
    _write_features(places.features)
    features: list[object] = ["cohort", "features", places.features, places.feature_cohort]
    _must([*features, "--features", places.features.parent], base)
    return places


def _must(words: list[object], folder: Path) -> None:
    ended = its2clr(words, folder, limit=600)
    assert ended.code == 0, ended.output


def _write_images(manifest: Path) -> None:
    rows = ["bag_id,label,path,split"]
    random = np.random.default_rng(0)
    for number in range(12):
        folder = manifest.parent / f"b{number}"
        folder.mkdir(parents=True)
        for image in range(6):
            pixels = random.integers(0, 255, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{image}.{('png', 'jpg')[image % 2]}")
        rows.append(f"b{number},{number % 2},b{number},{SPLITS[number // 2 % 3]}")
    manifest.write_text("\n".join(rows) + "\n")


def _write_slides(manifest: Path) -> None:
    manifest.parent.mkdir(parents=True)
    rows = ["bag_id,file,label,split"]
    for number in range(6):
        write_pyramid(manifest.parent / f"{number}.tif", draw(320, 240, seed=number, blobs=4))
        rows.append(f"{number},{number}.tif,{number % 2},{SPLITS[number // 2 % 3]}")
    manifest.write_text("\n".join(rows) + "\n")


def _write_features(manifest: Path) -> None:
    rows = ["bag_id,label,split"]
    random = np.random.default_rng(1)
    for number in range(12):
        trident(manifest.parent / f"b{number}.h5", random.random((12, 8), dtype=np.float32), grid(4, 3))
        rows.append(f"b{number},{number % 2},{SPLITS[number // 2 % 3]}")
    manifest.write_text("\n".join(rows) + "\n")

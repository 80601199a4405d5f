"""Small real images, manifests and cohorts."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from its2clr.cohort import Cohort, pack_images, read_manifest

TILE_SIZE = 16


def picture(seed: int, size: int = TILE_SIZE) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@dataclass
class Source:
    """A table of bags and one of instances with their images, ready to be spoiled."""

    folder: Path
    bags: Path
    instances: Path

    @property
    def manifest(self):
        return read_manifest(self.bags, self.instances)


@pytest.fixture
def make_picture() -> Callable[..., Image.Image]:
    return picture


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """Four bags in each split, two of each class; the second image of a positive bag is its witness."""
    folder = tmp_path / "source"
    (folder / "img").mkdir(parents=True)
    bags, instances = ["bag_id,label,patient,split,site"], ["bag_id,file,label"]
    number = 0
    for split in ("train", "val", "test"):
        for k in range(4):
            bag_id, label = f"{split}-{k:03d}", k % 2
            bags.append(f"{bag_id},{label},p{split}{k // 2},{split},ward {k}")
            for instance in range(2 + k):
                name = f"img/{number:04d}.png"
                picture(number).save(folder / name)
                instances.append(f"{bag_id},{name},{int(label and instance == 1)}")
                number += 1
    (folder / "bags.csv").write_text("\n".join(bags) + "\n")
    (folder / "instances.csv").write_text("\n".join(instances) + "\n")
    return Source(folder, folder / "bags.csv", folder / "instances.csv")


@pytest.fixture
def cohort(source: Source, tmp_path: Path) -> Cohort:
    pack_images(source.manifest, tmp_path / "cohort", tile_size=TILE_SIZE, encoding="png", workers=2)
    return Cohort.open(tmp_path / "cohort")

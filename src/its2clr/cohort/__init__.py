"""What a bag is and where it comes from: manifests, splits, tile files and the cohort folder."""

from its2clr.cohort.cohort import Cohort, load_tiles
from its2clr.cohort.doctor import examine
from its2clr.cohort.findings import Finding
from its2clr.cohort.images import pack_images
from its2clr.cohort.layout import CohortInfo, LeftOut, tile_path, write_bags, write_info, write_problems
from its2clr.cohort.manifest import Manifest, check_manifest, read_manifest
from its2clr.cohort.packing import PackSummary
from its2clr.cohort.splits import DEFAULT_FRACTIONS, SPLITS, assign_splits
from its2clr.cohort.tiles import TileFile, decode, read_labels, read_tiles, write_tile_file

__all__ = [
    "DEFAULT_FRACTIONS",
    "SPLITS",
    "Cohort",
    "CohortInfo",
    "Finding",
    "LeftOut",
    "Manifest",
    "PackSummary",
    "TileFile",
    "assign_splits",
    "check_manifest",
    "decode",
    "examine",
    "load_tiles",
    "pack_images",
    "read_labels",
    "read_manifest",
    "read_tiles",
    "tile_path",
    "write_bags",
    "write_info",
    "write_problems",
    "write_tile_file",
]

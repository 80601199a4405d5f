"""Cohorts of features around a run: from a run's own encoder, and in one step from a folder of feature files."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from its2clr.cohort import Cohort
from its2clr.cohort.features.feature_cohort import FeatureSummary, feature_cohort_info, pack_features
from its2clr.cohort.features.feature_manifest import read_feature_manifest
from its2clr.cohort.layout import INFO_FILE
from its2clr.cohort.packing import BagResult, pack_cohort, path_to_write
from its2clr.cohort.tiles import write_feature_tiles
from its2clr.errors import InputError
from its2clr.run.features import RunFeatures

_KEPT_ATTRIBUTES = ("mpp_level0", "annotation", "magnification")


class _Extracted(NamedTuple):
    bag_id: str
    features: NDArray[np.float32]


def pack_run_features(of_run: RunFeatures, encoder: str, out: Path) -> FeatureSummary:
    """Make a cohort of the features that a run's encoder gives; bags, splits, places and ground truth stay the same.

    Args:
        of_run: The features of the run.
        encoder: Which encoder of the run.
        out: The cohort folder; new, empty, or begun with the same run.

    Raises:
        InputError: The run has no such encoder, or the folder holds something else.
    """
    cohort = Cohort.open(of_run.run.cohort)
    found: dict[str, NDArray[np.float32]] = {}
    for name in dict.fromkeys(cohort.bags["split"].tolist()):
        part = cohort.split(name)
        features = of_run.of(encoder, part.without_labels()).features.cpu().numpy()
        found |= dict(zip(part.bags["bag_id"].tolist(), np.split(features, part.offsets()[1:-1]), strict=True))
    return pack_bag_features(cohort, found, of_run.maker(encoder), out)


def pack_bag_features(
    cohort: Cohort, features: Mapping[str, NDArray[np.float32]], maker: str, out: Path
) -> FeatureSummary:
    """Make a cohort of features of another cohort's instances; bags, splits, places and ground truth stay the same.

    Args:
        cohort: Whose instances they are.
        features: (instances, D) features of every bag, by its id.
        maker: What made them.
        out: The cohort folder; new, empty, or begun with features of the same maker.

    Raises:
        InputError: The folder holds something else.
    """
    feature_dim = int(next(iter(features.values())).shape[1])
    packed = pack_cohort(
        out,
        feature_cohort_info(
            cohort.tile_size,
            feature_dim,
            [maker],
            labelled=cohort.is_labelled,
            has_instance_labels=cohort.info.has_instance_labels,
        ),
        cohort.bags,
        {bag_id: _Extracted(bag_id, of_bag) for bag_id, of_bag in features.items()},
        finished=lambda _: None,
        pack=partial(_write_bag, cohort=cohort, out=out),
    )
    return FeatureSummary(**vars(packed.summary), feature_dim=feature_dim, layouts={"its2clr": len(cohort)}, notes={})


def _write_bag(bag: _Extracted, *, cohort: Cohort, out: Path) -> BagResult:
    tiles = cohort.tile_file(bag.bag_id)
    write_feature_tiles(
        path_to_write(out, bag.bag_id),
        bag.features,
        tiles.coords,
        tiles.names,
        tiles.labels if tiles.has_labels else None,
        bag_id=bag.bag_id,
        tile_size=tiles.tile_size,
        tile_size_level0=tiles.tile_size_level0,
        mpp=tiles.mpp,
        source=tiles.source,
        attributes={
            **{key: tiles.attributes[key] for key in _KEPT_ATTRIBUTES if key in tiles.attributes},
            **({} if tiles.overlap is None else {"overlap": tiles.overlap}),
        },
    )
    return BagResult(len(tiles))


def cohort_of_features(
    features: Path,
    labels: Path,
    run: Path,
    coords: Path | None,
    say: Callable[[str], None],
    positive: Collection[str] = (),
) -> Path:
    """The cohort that a folder of feature files and a table of labels make, in the run's folder.

    Args:
        features: Folder of feature files.
        labels: Table of bags.
        positive: Labels in words that mean 1; none: labels are 0 and 1.
        run: Folder of the run; the cohort is in `cohort` below it.
        coords: Folder of CLAM's `patches`, where it is not beside the features.
        say: Told what was found.

    Raises:
        InputError: The folder is a cohort already, or something is wrong with table or files.
    """
    if (features / INFO_FILE).is_file():
        raise InputError(f"{features}: is a cohort, which has its labels; leave --labels out")
    summary = pack_features(read_feature_manifest(labels, features, positive=positive), run / "cohort", coords=coords)
    for line in summary.lines():
        say(line)
    return summary.path

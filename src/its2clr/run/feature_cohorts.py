"""Cohorts of features around a run: from a run's own encoder, and in one step from a folder of feature files."""

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from its2clr.cohort import Cohort, CohortInfo
from its2clr.cohort.features.packing import EXTRACTORS, SOURCE, FeatureSummary, pack_features, read_feature_manifest
from its2clr.cohort.layout import BAGS_FILE, INFO_FILE, claim_folder, tile_path, write_bags, write_problems
from its2clr.cohort.tiles import write_feature_tiles
from its2clr.errors import InputError
from its2clr.files import hash_files
from its2clr.run.stages import Stages


def pack_run_features(stages: Stages, encoder: str, out: Path) -> FeatureSummary:
    """Make a cohort of the features that a run's encoder gives; bags, splits, places and ground truth stay the same.

    Args:
        stages: The run.
        encoder: Whose features: start, refined or end_to_end.
        out: The cohort folder; new, empty, or begun with the same run.

    Raises:
        InputError: The run has no such encoder, or the folder holds something else.
    """
    cohort = Cohort.open(stages.run.cohort)
    splits = dict.fromkeys(cohort.bags["split"].tolist())
    parts = {name: cohort.split(name) for name in splits}
    features = {name: stages.features(encoder, part.without_labels()).features for name, part in parts.items()}
    feature_dim = int(next(iter(features.values())).shape[1])
    checkpoint = stages.run.checkpoint(f"encoder-{encoder}")
    maker = f"{stages.config.encoder.name} {encoder} {hash_files(checkpoint)}"  # as in the run's feature files
    settings = {"source": SOURCE, "feature_dim": feature_dim, EXTRACTORS: [maker]}
    info = CohortInfo(
        tile_size=cohort.tile_size,
        encoding="features",
        kind="features",
        feature_dim=feature_dim,
        has_instance_labels=cohort.info.has_instance_labels,
        labelled=cohort.is_labelled,
        settings=settings,
    )
    claim_folder(out, info)
    (out / BAGS_FILE).unlink(missing_ok=True)  # while bags are being written the folder must not look complete
    for name, part in parts.items():
        values, offsets = features[name].cpu().numpy(), part.offsets()
        for number, bag_id in enumerate(part.bags["bag_id"].tolist()):
            tiles = part.tile_file(bag_id)
            kept = ("mpp_level0", "annotation", "magnification")
            write_feature_tiles(
                tile_path(out, bag_id),
                values[offsets[number] : offsets[number + 1]],
                tiles.coords,
                tiles.names,
                tiles.labels if tiles.has_labels else None,
                bag_id=bag_id,
                tile_size=tiles.tile_size,
                tile_size_level0=tiles.tile_size_level0,
                mpp=tiles.mpp,
                source=tiles.source,
                attributes={
                    **{key: tiles.attributes[key] for key in kept if key in tiles.attributes},
                    **({} if tiles.overlap is None else {"overlap": tiles.overlap}),
                },
            )
    write_problems(out, [])
    write_bags(out, pd.DataFrame(cohort.bags))
    return FeatureSummary(out, len(cohort), cohort.n_instances, feature_dim, {"its2clr": len(cohort)}, (), {})


def cohort_of_features(
    features: Path, labels: Path, run: Path, coords: Path | None, say: Callable[[str], None]
) -> Path:
    """The cohort that a folder of feature files and a table of labels make, in the run's folder.

    Args:
        features: Folder of feature files.
        labels: Table of bags.
        run: Folder of the run; the cohort is in `cohort` below it.
        coords: Folder of CLAM's `patches`, where it is not beside the features.
        say: Told what was found.

    Raises:
        InputError: The folder is a cohort already, or something is wrong with table or files.
    """
    if (features / INFO_FILE).is_file():
        raise InputError(f"{features}: is a cohort, which has its labels; leave --labels out")
    summary = pack_features(read_feature_manifest(labels, features), run / "cohort", coords=coords)
    for line in summary.lines():
        say(line)
    return summary.path

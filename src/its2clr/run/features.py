"""Features of bags by the encoders of a run: read from its feature files, or extracted and written there."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from its2clr.bag_features import BagFeatures
from its2clr.bags import Bags
from its2clr.cohort import Cohort
from its2clr.cohort.features.feature_file import FeatureFile, feature_path, read_feature_file, write_feature_file
from its2clr.encoders.extraction import extract_features
from its2clr.encoders.weights import load_network
from its2clr.engine.devices import Engine
from its2clr.engine.mapped_rows import give_back
from its2clr.errors import InputError
from its2clr.plugins import import_plugins
from its2clr.run.directory import RunDirectory
from its2clr.run.made_from import feature_maker
from its2clr.run.names import ENCODERS, STAGE_OF, encoder_file
from its2clr.run.saved import require_run_config
from its2clr.tile_store import TileStore, disk_folder, room_for_features


class RunFeatures:
    """Features by the encoders of a run.

    Args:
        run: The run directory.
        engine: Device and processes.
        write: Whether features are written to the run, or only held in memory.
    """

    def __init__(self, run: RunDirectory, engine: Engine, *, write: bool) -> None:
        self.run, self.engine, self._write = run, engine, write
        self._held: dict[tuple[str, ...], torch.Tensor] = {}
        self._decoded: list[Bags] = []

    def reuse(self, *bags: Bags) -> None:
        """Splits whose tiles are decoded already, or will be: their tiles are taken from there."""
        self._decoded = list(bags)

    def of(self, encoder: str, cohort: Cohort, labels: NDArray[np.int64] | None = None) -> BagFeatures:
        """An encoder's features of a cohort's bags.

        Args:
            encoder: Name of the encoder.
            cohort: Bags to represent; its labels are not looked at.
            labels: Bag labels to attach, where the caller may know them.

        Raises:
            InputError: The run has no such encoder (yet).
        """
        require_encoder(self.run, encoder)
        flat = self._read_or_extract(encoder, cohort) if self._write else self._remembered(encoder, cohort)
        known = None if labels is None else torch.from_numpy(labels)
        groups = cohort.bags["group"].to_numpy(dtype=str)
        return BagFeatures(flat.to(self.engine.device), torch.from_numpy(cohort.offsets()), known, groups)

    def extract(self, encoder: str, cohort: Cohort) -> torch.Tensor:
        """(N, D) features of any cohort's instances, computed and not kept."""
        network = load_network(require_encoder(self.run, encoder)).to(self.engine.device)
        return extract_features(network.encoder, self._tiles(cohort), self.engine, self.engine.extract_batch_size)

    def maker(self, encoder: str) -> str:
        """What the feature files say they were made with: network, encoder, and a hash of its weights."""
        return feature_maker(self.run.path, self.run.config, encoder)

    def _read_or_extract(self, encoder: str, cohort: Cohort) -> torch.Tensor:
        maker, folder = self.maker(encoder), self.run.path / "features" / encoder
        made_from = self._content(cohort)
        flat = self._read(cohort, folder, maker, made_from)
        if self.engine.broadcast(flat is None):
            flat = self.extract(encoder, cohort)
            if self.engine.is_writer:
                write_features(cohort, flat.cpu().numpy(), folder, maker, made_from)
        self.engine.barrier()
        assert flat is not None
        return flat

    def _read(self, cohort: Cohort, folder: Path, maker: str, made_from: Sequence[str]) -> torch.Tensor | None:
        """What the feature files hold; None if one is missing or was made by something else, or of other tiles."""
        paths = [feature_path(folder, bag_id) for bag_id in cohort.bags["bag_id"]]
        if not all(path.is_file() for path in paths):
            return None
        flat, offsets = None, cohort.offsets()
        for path, tiles, start, end in zip(paths, made_from, offsets[:-1], offsets[1:], strict=True):
            file = read_feature_file(path)
            if (file.encoder, file.tiles) != (maker, tiles) or len(file.features) != end - start:
                return None
            if flat is None:
                dim = file.features.shape[1]
                flat = room_for_features(int(offsets[-1]), dim, self.engine, disk_folder(cohort, self.engine))
            flat[start:end] = torch.from_numpy(file.features)
            give_back()
        return flat

    def _remembered(self, encoder: str, cohort: Cohort) -> torch.Tensor:
        key = (self.maker(encoder), *self._content(cohort))
        if key not in self._held:
            self._held[key] = self.extract(encoder, cohort)
        return self._held[key]

    def _content(self, cohort: Cohort) -> list[str]:
        """What the features of each bag depend on besides the encoder: a hash of its tiles."""
        return self.engine.on_writer(lambda: [bag.tiles for bag in cohort.without_labels().identity().bags])

    def _tiles(self, cohort: Cohort) -> TileStore:
        if cohort.path.resolve() == self.run.cohort:
            for bags in self._decoded:
                same = np.array_equal(cohort.bags["bag_id"].to_numpy(dtype=str), bags.bag_ids)
                if same and bags.tiles.content == self.engine.on_writer(lambda: cohort.identity().tiles):
                    return bags.tiles
        return TileStore.from_cohort(cohort.without_labels(), self.engine)


def open_run_features(run: str | Path, *, quiet: bool = False) -> RunFeatures:
    """The features of a run that has begun, on an engine of its settings.

    Args:
        run: Folder of the run.
        quiet: Say nothing.

    Raises:
        InputError: The folder is not a run.
    """
    config, _ = require_run_config(run)
    import_plugins(config.plugins)
    engine = Engine(config.engine)
    engine.bars.enabled &= not quiet
    return RunFeatures(RunDirectory(run, config, None, engine), engine, write=True)


def require_encoder(run: RunDirectory, encoder: str) -> Path:
    """The checkpoint of an encoder of a run.

    Raises:
        InputError: There is no such encoder (yet), or it is not the one that the run trained.
    """
    if encoder not in ENCODERS:
        raise InputError(f"no encoder named {encoder!r}; there are {', '.join(ENCODERS)}")
    stage = STAGE_OF[encoder]
    if run.done(stage) is None:
        command = stage.replace("_", "-")
        raise InputError(
            f"{run.path}: the {encoder} encoder is not there yet; run `its2clr {command}` on this run first"
        )
    run.check_written(stage)
    return encoder_file(run.path, encoder)


def write_features(
    cohort: Cohort, features: NDArray[np.float32], folder: Path, maker: str, made_from: Sequence[str]
) -> None:
    """Write one feature file per bag of a cohort.

    Args:
        cohort: The bags.
        features: (N, D) of all their instances.
        folder: Where to.
        maker: What made them.
        made_from: Hash of the tiles of each bag.
    """
    offsets = cohort.offsets()
    for number, bag_id in enumerate(cohort.bags["bag_id"]):
        tiles = cohort.tile_file(bag_id)
        rows = slice(offsets[number], offsets[number + 1])
        write_feature_file(
            feature_path(folder, tiles.bag_id),
            FeatureFile(features[rows], tiles.coords, maker, made_from[number]),
            bag_id=tiles.bag_id,
            tile_size=tiles.tile_size,
            tile_size_level0=tiles.tile_size_level0,
            mpp=tiles.mpp,
            overlap=tiles.overlap,
        )
        give_back()

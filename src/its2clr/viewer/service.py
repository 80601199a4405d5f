"""What the viewer shows, as plain values: the run, its bags, their scores and instances."""

import hashlib
import io
import math
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

from its2clr.cohort.canvas import slide_tile, unseen_tile
from its2clr.cohort.layout import BAGS_FILE, INFO_FILE, tile_path
from its2clr.cohort.splits import SPLITS
from its2clr.cohort.tiles import TileFile, decode, read_encoded
from its2clr.errors import InputError
from its2clr.files import stamp
from its2clr.run.names import encoder_names
from its2clr.run.scores import BAG_PREDICTIONS_FILE, PREDICTIONS_FILE, RESULTS_FILE, BagScores, Model, RunScores
from its2clr.version import __version__
from its2clr.viewer.bag_list import BagTable, Question
from its2clr.viewer.deep_zoom import JPEG_QUALITY, OVERLAP, TILE, Pictures
from its2clr.viewer.neighbours import Neighbours
from its2clr.viewer.round_cache import Rounds

_HELD_TILE_FILES = 32


class MissingError(LookupError):
    """There is no such bag, instance, model, round or tile; the message says which."""


class Viewer:
    """Answers what the page asks; a bag is named by its number in the cohort.

    Args:
        run: Folder of an evaluated run.

    Raises:
        InputError: There is no run, it was not evaluated yet, or its cohort is not there.
    """

    def __init__(self, run: str | Path) -> None:
        self.scores = RunScores(run)
        self.table = BagTable(self.scores)
        self.rounds = Rounds(self.scores)
        self.neighbours = Neighbours(self.scores, self.table)
        self.pictures = Pictures(self._read_tile_file, self.picture_tag)
        self.outdated = self.scores.outdated()
        self._models = {key_of(model): model for model in self.table.models}
        self._held_tile_file = lru_cache(_HELD_TILE_FILES)(lambda number, _: self._read_tile_file(number))
        self._lock = threading.Lock()
        self._read = {path: stamp(path) for path in self._tables() if path.is_file()}

    def _tables(self) -> list[Path]:
        """Files of run and cohort that what is in memory was read from, and the models that it is of."""
        run, cohort = self.scores.run, self.scores.cohort.path
        rounds = run.glob("rounds/*/pseudo_labels.parquet")
        models = [*run.glob("checkpoints/encoder-*.safetensors"), *run.glob("aggregators/*.safetensors")]
        tables = [run / name for name in (RESULTS_FILE, PREDICTIONS_FILE, BAG_PREDICTIONS_FILE)]
        return [*tables, *rounds, *models, cohort / BAGS_FILE, cohort / INFO_FILE]

    def _check_tables(self) -> None:
        """Refuse to answer from what is in memory when the files have changed since.

        Raises:
            InputError: They have.
        """
        for path, before in self._read.items():
            if not path.is_file() or stamp(path) != before:
                raise InputError(f"{path} has changed since the viewer was started; start `its2clr view` again")

    def close(self) -> None:
        """Close the open slides."""
        self.pictures.close()

    def run(self) -> dict[str, Any]:
        """What is the same for all bags: models, rounds, splits, and what has changed since the run was evaluated."""
        self._check_tables()
        results, table = self.scores.results, self.table
        rounds = {entry["epoch"]: entry for entry in results.get("rounds", ())}
        told = ("threshold", "validation_auc", "pseudo_labels_replaced", "instance_auc")
        return {
            "name": self.scores.run.resolve().name,
            "cohort": self.scores.cohort.name,
            "version": __version__,
            "models": [self._describe(model) for model in table.models],
            "best": key_of(self.scores.best),
            "rounds": [
                {"epoch": epoch} | {name: rounds.get(epoch, {}).get(name) for name in told}
                for epoch in self.rounds.epochs
            ],
            "splits": {split: table.split.count(split) for split in SPLITS if split in table.split},
            "n_bags": len(table),
            "n_instances": self.scores.cohort.n_instances,
            "threshold": table.thresholds[table.models.index(self.scores.best)].instance,
            "has_truth": self.scores.cohort.has_instance_labels,
            "outdated": self.outdated,
        }

    def _describe(self, model: Model) -> dict[str, Any]:
        names = encoder_names(self.scores.config)
        thresholds = self.table.thresholds[self.table.models.index(model)]
        return {
            "key": key_of(model),
            "encoder": model.encoder,
            "aggregator": model.aggregator,
            "title": f"{names.get(model.encoder, model.encoder)} + {model.aggregator}",
            "bag_threshold": thresholds.bag,
            "instance_threshold": thresholds.instance,
        }

    def model(self, key: str | None) -> Model:
        """The model of a key; None: the best.

        Raises:
            MissingError: There is no such model.
        """
        if key is None:
            return self.scores.best
        found = self._models.get(key) or self._models.get(key.replace(" ", "+"))  # "+" in an address means a blank
        if found is None:
            raise MissingError(f"no model {key!r}; there are {', '.join(self._models)}")
        return found

    def bags(self, question: Question) -> dict[str, Any]:
        """One page of the list of bags."""
        self._check_tables()
        return self.table.page(question)

    def bag(self, number: int) -> dict[str, Any]:
        """What is the same for all models: a bag's row in the list, its picture, and where its instances are."""
        tiles = self.tile_file(number)
        with self.pictures.open(number) as picture:
            size, is_slide = picture.size, picture.is_slide
        truth = tiles.labels if tiles.has_labels else None
        return {
            **self.table.row(number, self.scores.best),
            "probabilities": {
                key: _finite(self.table.probability[row, number]) for row, key in enumerate(self._models)
            },
            "width": size[0],
            "height": size[1],
            "is_slide": is_slide,
            "side": tiles.tile_size_level0,
            "tile_size": tiles.tile_size,
            "mpp": _finite(tiles.mpp_level0),
            "coords": tiles.coords.tolist(),
            "truth": None if truth is None else truth.tolist(),
            "rounds": self._takes_part(number),
        }

    def _takes_part(self, number: int) -> dict[str, Any]:
        """Whether the rounds say anything about a bag, and if not, why."""
        split = self.table.split[number]
        if not self.rounds.epochs:
            return {"available": False, "reason": "this run has no refinement rounds"}
        if split != "train":
            return {"available": False, "reason": f"{split} bag; rounds hold training bags only"}
        return {"available": True, "reason": ""}

    def bag_scores(self, number: int, model: Model) -> dict[str, Any]:
        """What a model says about a bag and its instances."""
        found = self._scores_of(number, model)
        return {"model": key_of(model), "bag_probability": found.probability, "probability": found.instances.tolist()}

    def round_scores(self, number: int, epoch: int) -> dict[str, Any]:
        """What the round after an epoch says about the instances of a training bag.

        Raises:
            MissingError: There was no such round, or the bag took no part in it.
        """
        self._check_bag(number)
        if epoch not in self.rounds.epochs:
            raise MissingError(f"no round after epoch {epoch}")
        found = self.rounds.bag(self.table.bag_id[number], epoch)
        if found is None:
            raise MissingError(self._takes_part(number)["reason"] or "the bag took no part in this round")
        return {
            "round": epoch,
            "probability": found.probability.tolist(),
            "pseudo_label": found.pseudo_label.tolist(),
            "selected": found.selected.tolist(),
        }

    def deep_zoom(self, number: int) -> dict[str, Any]:
        """The Deep Zoom description of a bag's picture, in its JSON form; the address is relative to the page."""
        self._check_bag(number)
        with self.pictures.open(number) as picture:
            width, height = picture.size
        size = {"Width": width, "Height": height}
        address = {"Url": f"api/bags/{number}/tiles/", "Format": "jpg", "Overlap": OVERLAP, "TileSize": TILE}
        return {"Image": {"xmlns": "http://schemas.microsoft.com/deepzoom/2008", **address, "Size": size}}

    def picture_tile(self, number: int, level: int, column: int, row: int) -> bytes:
        """One JPEG tile of a bag's picture.

        Raises:
            MissingError: There is no such tile.
        """
        self._check_bag(number)
        found = self.pictures.jpeg(number, level, column, row)
        if found is None:
            raise MissingError(f"no tile {column}_{row} at level {level}")
        return found

    def picture_tag(self, number: int, *which: int) -> str:
        """A tag that changes when the pixels may have changed; made from times and sizes of the files behind a bag."""
        tiles = self.tile_file(number)
        known: list[object] = [__version__, self.table.bag_id[number], *which]
        for path in (tiles.path, Path(tiles.source)):
            try:
                found = path.stat()
                known += [str(path), found.st_mtime_ns, found.st_size]
            except (OSError, ValueError):
                known.append(str(path))
        return hashlib.sha256(repr(known).encode("utf-8", "replace")).hexdigest()[:24]

    def instance(self, number: int, instance: int) -> dict[str, Any]:
        """Everything about one instance but its neighbours."""
        tiles = self._check_instance(number, instance)
        truth = int(tiles.labels[instance]) if tiles.has_labels and tiles.labels is not None else None
        models = []
        for key, model in self._models.items():
            probabilities = self._scores_of(number, model).instances
            own = float(probabilities[instance])
            models.append({"model": key, "probability": own, "rank": int((probabilities > own).sum()) + 1})
        x, y = tiles.coords[instance].tolist()
        return {
            "bag": number,
            "bag_id": self.table.bag_id[number],
            "instance": instance,
            "name": tiles.names[instance],
            "x": x,
            "y": y,
            "side": tiles.tile_size_level0,
            "truth": truth,
            "models": models,
            "rounds": self._history(number, instance),
            "image": f"api/bags/{number}/instances/{instance}/image",
        }

    def _history(self, number: int, instance: int) -> list[dict[str, Any]]:
        """What each round said about an instance."""
        epochs = self.rounds.epochs if self._takes_part(number)["available"] else []
        of_bag = {epoch: self.rounds.bag(self.table.bag_id[number], epoch) for epoch in epochs}
        return [
            {
                "epoch": epoch,
                "probability": float(found.probability[instance]),
                "pseudo_label": int(found.pseudo_label[instance]),
                "selected": int(found.selected[instance]),
            }
            for epoch, found in of_bag.items()
            if found is not None
        ]

    def instance_neighbours(self, number: int, instance: int, model: Model) -> dict[str, Any]:
        """The instances with the most similar features; `problem` says why there are none."""
        self._check_instance(number, instance)
        try:
            found: dict[str, Any] = {
                "within": self.neighbours.within(model.encoder, number, instance),
                "across": self.neighbours.across(model.encoder, number, instance),
            }
        except InputError as error:
            return {"encoder": model.encoder, "problem": str(error)}
        for near in [*found["within"]["found"], *found["across"]["found"]]:
            near["bag_id"] = self.table.bag_id[near["bag"]]
            near["probability"] = float(self._scores_of(near["bag"], model).instances[near["instance"]])
            near["image"] = f"api/bags/{near['bag']}/instances/{near['instance']}/image"
        return {"encoder": model.encoder, "measure": "cosine similarity of features", **found}

    def instance_image(self, number: int, instance: int) -> tuple[bytes, str]:
        """The tile of an instance, and whether it is `png` or `jpeg`; of features it is cut from the slide."""
        tiles = self._check_instance(number, instance)
        if not tiles.has_images:
            buffer = io.BytesIO()
            (slide_tile(tiles, instance) or unseen_tile()).save(buffer, "JPEG", quality=JPEG_QUALITY)
            return buffer.getvalue(), "jpeg"
        encoded = read_encoded(tiles.path, instance, instance + 1, len(tiles))[1].tobytes()
        decode(encoded)  # whatever else a tile file may hold is not sent
        return encoded, "png" if encoded.startswith(b"\x89PNG") else "jpeg"

    def tile_file(self, number: int) -> TileFile:
        """The tile file of a bag; the last few are kept.

        Raises:
            MissingError: There is no such bag.
        """
        self._check_bag(number)
        return self._held_tile_file(number, tuple(stamp(tile_path(self.scores.cohort.path, self.table.bag_id[number]))))

    def _read_tile_file(self, number: int) -> TileFile:
        return self.scores.cohort.tile_file(self.table.bag_id[number])

    def _scores_of(self, number: int, model: Model) -> BagScores:
        self._check_bag(number)
        with self._lock:  # the first call reads the predictions of all bags
            found = self.scores.bag(self.table.bag_id[number], model)
        if len(found.instances) != self.table.n_instances[number]:
            raise InputError(f"{self.scores.run}: its predictions are of another cohort; run `its2clr evaluate` again")
        return found

    def _check_bag(self, number: int) -> None:
        if not 0 <= number < len(self.table):
            raise MissingError(f"no bag number {number}")
        self._check_tables()
        self.scores.check_bag(self.table.bag_id[number])

    def _check_instance(self, number: int, instance: int) -> TileFile:
        tiles = self.tile_file(number)
        if not 0 <= instance < len(tiles):
            raise MissingError(f"bag number {number} has no instance {instance}")
        return tiles


def key_of(model: Model) -> str:
    """How a model is named in addresses."""
    return f"{model.encoder}+{model.aggregator}"


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None

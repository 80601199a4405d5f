"""What the viewer shows, as plain values: the run, its bags, their scores and instances."""

import hashlib
import io
import math
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

from its2clr.cohort.canvas import slide_tile, unseen_tile
from its2clr.cohort.layout import tile_path
from its2clr.cohort.splits import SPLITS
from its2clr.cohort.tiles import TileFile, decode, read_encoded
from its2clr.errors import InputError
from its2clr.files import stamp
from its2clr.run.scores import BagScores, Model
from its2clr.version import __version__
from its2clr.viewer.bag_list import BagTable, Question
from its2clr.viewer.deep_zoom import JPEG_QUALITY, OVERLAP, TILE, Pictures
from its2clr.viewer.marks import Mark, Marks, own_folder
from its2clr.viewer.neighbours import Neighbours
from its2clr.viewer.outlines import read_outlines
from its2clr.viewer.round_cache import Rounds
from its2clr.viewer.shown import UNKNOWN, ShownModel, open_shown

_HELD_TILE_FILES = 32


class MissingError(LookupError):
    """There is no such bag, instance, model, round or tile; the message says which."""


class Viewer:
    """Answers what the page asks; a bag is named by its number in the list.

    Args:
        folder: Folder of an evaluated run, or of what `its2clr predict` wrote.
        marks: Folder of the marks that a person makes; None: `corrections` in that folder.

    Raises:
        InputError: It is neither, it was not evaluated yet, or its cohort is not there.
    """

    def __init__(self, folder: str | Path, marks: Path | None = None) -> None:
        self.shown = open_shown(folder)
        self.table = BagTable(self.shown)
        self.rounds = Rounds(self.shown)
        self.neighbours = Neighbours(self.shown, self.table)
        self.pictures = Pictures(self._read_tile_file, self.picture_tag)
        self.marks = Marks(marks or own_folder(self.shown.path))
        self._models = {key_of(model): model for model in self.table.models}
        self._held_tile_file = lru_cache(_HELD_TILE_FILES)(lambda number, _: self._read_tile_file(number))
        self._lock = threading.Lock()
        self._read = {path: stamp(path) for path in self.shown.tables if path.is_file()}

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
        table, rounds = self.table, self.shown.about_rounds()
        told = ("threshold", "validation_auc", "pseudo_labels_replaced", "instance_auc")
        cohorts = {bag.cohort.path: bag.cohort for bag in table.bags}.values()
        return {
            "name": self.shown.path.resolve().name,
            "cohort": ", ".join(cohort.name for cohort in cohorts),
            "version": __version__,
            "models": [self._describe(one) for one in self.shown.models],
            "best": key_of(self.shown.best),
            "rounds": [
                {"epoch": epoch} | {name: rounds.get(epoch, {}).get(name) for name in told}
                for epoch in self.rounds.epochs
            ],
            "splits": {split: table.split.count(split) for split in SPLITS if split in table.split},
            "n_bags": len(table),
            "n_instances": sum(table.n_instances),
            "has_labels": bool((table.label != UNKNOWN).any()),
            "has_truth": any(cohort.has_instance_labels for cohort in cohorts),
            "outdated": self.shown.outdated,
            "marks": str(self.marks.folder),
        }

    def _describe(self, shown: ShownModel) -> dict[str, Any]:
        return {
            "key": key_of(shown.model),
            "encoder": shown.model.encoder,
            "aggregator": shown.model.aggregator,
            "title": shown.title,
            "bag_threshold": shown.thresholds.bag,
            "instance_threshold": shown.thresholds.instance,
        }

    def model(self, key: str | None) -> Model:
        """The model of a key; None: the best.

        Raises:
            MissingError: There is no such model.
        """
        if key is None:
            return self.shown.best
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
            **self.table.row(number, self.shown.best),
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
            return {"available": False, "reason": "there are no refinement rounds here"}
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

    def annotation(self, number: int) -> dict[str, Any]:
        """The outlines that a person drew on the slide before it was tiled, as polygons at level 0."""
        tiles = self.tile_file(number)
        with self.pictures.open(number) as picture:
            size = picture.size
        return read_outlines(tiles, self.table.bags[number].cohort.info, size)

    def marked(self, number: int) -> dict[str, Any]:
        """What a person has marked in a bag, and whether `its2clr correct` will use it."""
        tiles, bag = self.tile_file(number), self.table.bags[number]
        return {**self.marks.of_bag(bag.bag_id, tiles), "note": self._note_on_marks(number)}

    def mark(self, number: int, mark: Mark) -> dict[str, Any]:
        """Mark an instance or an area, or take marks away there.

        Raises:
            MissingError: There is no such instance.
        """
        tiles = self.tile_file(number) if mark.instance is None else self._check_instance(number, mark.instance)
        self.marks.add(self.table.bags[number].bag_id, tiles, mark)
        return self.marked(number)

    def undo_mark(self, number: int) -> dict[str, Any]:
        """Take back the last mark in a bag."""
        self._check_bag(number)
        self.marks.undo(self.table.bags[number].bag_id)
        return self.marked(number)

    def _note_on_marks(self, number: int) -> str:
        """What a person should know before marking this bag."""
        bag = self.table.bags[number]
        if not self.shown.is_run:
            return "`its2clr correct` takes marks in training bags of a run; these are new bags"
        if bag.split != "train":
            return f"{bag.split} bag: `its2clr correct` uses training bags only"
        if bag.label == 0:
            return "this bag is labelled negative: `its2clr correct` refuses positive marks in it"
        return ""

    def thumbnail(self, number: int) -> bytes:
        """A small picture of a bag as JPEG."""
        return self.pictures.thumbnail(number)

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
        bag = self.table.bags[number]
        return self._held_tile_file(number, tuple(stamp(tile_path(bag.cohort.path, bag.stored_id))))

    def _read_tile_file(self, number: int) -> TileFile:
        bag = self.table.bags[number]
        return bag.cohort.tile_file(bag.stored_id)

    def _scores_of(self, number: int, model: Model) -> BagScores:
        self._check_bag(number)
        with self._lock:  # the first call reads the predictions of all bags
            found = self.shown.scores(self.table.bags[number], model)
        if len(found.instances) != self.table.n_instances[number]:
            raise InputError(f"{self.shown.path}: its predictions are of another cohort; make them again")
        return found

    def _check_bag(self, number: int) -> None:
        if not 0 <= number < len(self.table):
            raise MissingError(f"no bag number {number}")
        self._check_tables()
        self.shown.check_bag(self.table.bags[number])

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

"""Bags that a model has seen: its file keeps hashes of their tiles, with which those of predicted bags are compared.

Scores of bags that the model was trained or chosen on flatter it. From a hash nobody learns anything about a bag.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from its2clr.cohort.identity import Identity
from its2clr.predict.prediction_folder import read_provenance
from its2clr.wording import shortened

_DIGITS = 16
_LISTED = 5
_WORDS = {"train": "trained on", "val": "chosen and calibrated on", "test": "tested on"}


def bag_hashes(identity: Identity | None) -> dict[str, list[str]]:
    """Short hashes of the tiles of a cohort's bags, by split, sorted; empty if they are not known."""
    if identity is None:
        return {}
    found: dict[str, list[str]] = {split: [] for split in _WORDS}
    for bag in identity.bags:
        found[bag.split].append(bag.tiles[:_DIGITS])
    return {split: sorted(hashes) for split, hashes in found.items()}


def seen_bags(hashes: Mapping[str, Sequence[str]], tiles: Mapping[str, str]) -> dict[str, list[str]]:
    """The bags that are among those of a model, by split.

    Args:
        hashes: What `bag_hashes` gave of the model's cohort.
        tiles: The hash of the tiles of each bag, by its name.
    """
    known = {split: set(of_split) for split, of_split in hashes.items()}
    return {
        split: [name for name, found in tiles.items() if found[:_DIGITS] in of_split]
        for split, of_split in known.items()
    }


def seen_in_training(predictions: Path, bag_ids: set[str]) -> dict[str, list[str]]:
    """Which of these predicted bags the model had among its own, by split; empty if it does not say."""
    found: dict[str, list[str]] = read_provenance(predictions).get("seen_in_training", {})
    return {split: [name for name in names if name in bag_ids] for split, names in found.items()}


def said_seen(found: Mapping[str, Sequence[str]]) -> list[str]:
    """Sentences about bags that the model has seen; none if it has seen none."""
    return [
        f"the model was {words} {len(found[split])} of these bags, so their scores say little about new patients: "
        f"{shortened(found[split], _LISTED)}"
        for split, words in _WORDS.items()
        if found.get(split)
    ]


def tiles_of(cohorts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The hash of the tiles of each predicted bag, from what `prediction.json` says of the cohorts."""
    return {name: entry["tiles"][bag_id] for entry in cohorts for name, bag_id in entry["bags"].items()}

"""Tiles as pictures in the page: which of them are worth a look, and how they are embedded."""

import base64
import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from PIL import Image

from its2clr.cohort import Cohort
from its2clr.cohort.canvas import slide_tile
from its2clr.cohort.layout import tile_path
from its2clr.cohort.tiles import decode, read_encoded
from its2clr.report.run_facts import Scored

SHOWN = 12
"""Tiles of a row of pictures."""
PER_BAG = 2
"""Of one bag in such a row, so that one bag does not fill it."""
BAGS_SHOWN = 6
"""Missed bags, and false alarms, that are shown with tiles."""
TILES_OF_BAG = 4
SIDE = 96
"""Largest side of an embedded picture; a larger tile is scaled down to it."""


class Picture(NamedTuple):
    """One tile in the page.

    Attributes:
        uri: The image itself, as a data address.
        bag_id: Its bag.
        instance: Its number in the bag.
        probability: To be positive.
        truth: 1, 0, or -1 for unknown.
    """

    uri: str
    bag_id: str
    instance: int
    probability: float
    truth: int


class Strip(NamedTuple):
    """A row of tiles with its heading; `nothing` is said where there are none."""

    title: str
    pictures: Sequence[Picture]
    nothing: str = "There are none."


class WrongBag(NamedTuple):
    """A bag on the wrong side of the threshold, with its highest-ranked tiles."""

    bag_id: str
    label: str
    probability: float
    pictures: Sequence[Picture]


def ranked_strips(cohort: Cohort, best: Scored, instances: pd.DataFrame) -> list[Strip]:
    """The highest- and lowest-ranked tiles of positive and of negative test bags."""
    test = best.bags[best.bags["split"] == "test"]
    strips = []
    for label, name in ((1, "positive"), (0, "negative")):
        bags = set(test.loc[test["label"] == label, "bag_id"])
        for highest in (True, False):
            title = f"{'Highest' if highest else 'Lowest'}-ranked tiles of {name} test bags"
            strips.append(Strip(title, pictures(cohort, ranked(instances, bags, highest=highest))))
    return strips


def mistake_strips(cohort: Cohort, instances: pd.DataFrame, threshold: float) -> list[Strip]:
    """The tiles of each class that are most wrong at the model's threshold; none without ground truth."""
    if not (instances["label"] >= 0).any():
        return []
    return [
        Strip(title, pictures(cohort, wrong_instances(instances, truth, threshold)), nothing)
        for title, truth, nothing in (
            ("Truly negative tiles with the highest probability", 0, f"No negative tile has {threshold:.3g} or more."),
            ("Truly positive tiles with the lowest probability", 1, f"No positive tile has less than {threshold:.3g}."),
        )
    ]


def pictured_mistakes(cohort: Cohort, best: Scored, threshold: float, instances: pd.DataFrame) -> list[WrongBag]:
    """The bags that are most wrong at the model's threshold, with their tiles."""
    test = best.bags[best.bags["split"] == "test"]
    found = []
    for label, name in ((1, "positive, called negative"), (0, "negative, called positive")):
        for row in wrong_bags(test, threshold, label).to_dict("records"):
            bag_id = str(row["bag_id"])
            highest = ranked(instances, {bag_id}, highest=True, count=TILES_OF_BAG, per_bag=TILES_OF_BAG)
            found.append(WrongBag(bag_id, name, float(row["probability"]), pictures(cohort, highest)))
    return found


def ranked(
    instances: pd.DataFrame, bags: set[str], *, highest: bool, count: int = SHOWN, per_bag: int = PER_BAG
) -> pd.DataFrame:
    """The highest or lowest tiles of some bags.

    Args:
        instances: `bag_id`, `instance`, `probability`, `label`.
        bags: Bags to look at.
        highest: Whether the most or the least positive ones.
        count: How many.
        per_bag: How many of one bag at most.
    """
    of_bags = instances[instances["bag_id"].isin(list(bags))]
    ordered = of_bags.sort_values("probability", ascending=not highest, kind="stable")
    return ordered[ordered.groupby("bag_id", sort=False).cumcount() < per_bag].head(count)


def wrong_instances(instances: pd.DataFrame, truth: int, threshold: float, count: int = SHOWN) -> pd.DataFrame:
    """The tiles of one true class that are called the other at the threshold, the surest first."""
    of_class = instances[instances["label"] == truth]
    ordered = of_class.sort_values("probability", ascending=truth == 1, kind="stable")
    wrong = ordered["probability"] < threshold if truth == 1 else ordered["probability"] >= threshold
    return ordered[wrong].head(count)


def wrong_bags(bags: pd.DataFrame, threshold: float, label: int, count: int = BAGS_SHOWN) -> pd.DataFrame:
    """Test bags of one label called the other at the threshold, the most confident first."""
    of_label = bags[bags["label"] == label]
    called = of_label["probability"] >= threshold
    wrong = of_label[~called if label == 1 else called]
    return wrong.sort_values("probability", ascending=label == 1, kind="stable").head(count)


def pictures(cohort: Cohort, rows: pd.DataFrame) -> list[Picture]:
    """The tiles of these rows, in their order; only these are read, not their whole bags.

    In a cohort of features they are cut from the slide; where that cannot be read, they are left out.

    Raises:
        InputError: A tile file is missing or damaged.
    """
    counts = dict(zip(cohort.bags["bag_id"].tolist(), cohort.bags["n_instances"].tolist(), strict=True))
    found = []
    for row in rows.to_dict("records"):
        bag_id, instance = str(row["bag_id"]), int(row["instance"])
        if cohort.kind == "features":
            image = slide_tile(cohort.tile_file(bag_id), instance)
        else:
            _, encoded = read_encoded(tile_path(cohort.path, bag_id), instance, instance + 1, counts[bag_id])
            image = Image.fromarray(decode(np.asarray(encoded).tobytes()))
        if image is None:
            continue
        found.append(Picture(embedded(image), bag_id, instance, float(row["probability"]), int(row["label"])))
    return found


def embedded(image: Image.Image) -> str:
    """An image as a data address, at most `SIDE` pixels wide and high."""
    if max(image.size) > SIDE:
        image = image.copy()
        image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=88, subsampling=0, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")

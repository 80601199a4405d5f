"""Write maps: a picture per bag, one sheet of several bags, and overlays for viewers of slides.

```
maps.png                     several bags at a glance
bags/<bag_id>.png            one bag: image, ground truth, one panel per model
overlays/<model>/colour/<bag_id>.ome.tiff        colours over the slide, transparent below the threshold
overlays/<model>/probability/<bag_id>.ome.tiff   the probabilities themselves
```
In names of files, characters that file systems refuse are percent-encoded, as in the cohort.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from PIL import Image

from its2clr.cohort.canvas import open_canvas
from its2clr.errors import InputError
from its2clr.files import atomic_path
from its2clr.maps.colours import check_threshold
from its2clr.maps.overlay import Ground, choose_factor, write_overlay, write_probability
from its2clr.maps.panels import draw_bag
from its2clr.maps.sheet import lay_out
from its2clr.maps.source import ScoredModel, Source, bag_file, open_source

SHEET_FILE = "maps.png"
SHEET_BAGS = 6
_SHEET_LONGEST = 400
_SMALLEST, _LARGEST = 32, 20_000

Progress = Callable[[int, int], None]


def models_beside(source: Source, models: Sequence[ScoredModel], runs: Sequence[Path]) -> tuple[ScoredModel, ...]:
    """Models and, beside them, the best model of other runs on the same bags, such as ablations.

    Raises:
        InputError: If another run has no scores of a bag of the source.
    """
    shown = list(models)
    for run in runs:
        other = open_source(run)
        missing = set(source.places) - set(other.places)
        if missing:
            raise InputError(f"{run}: has no predictions for bag {min(missing)!r}; give runs on the same cohort")
        title, name = other.best.title, f"{other.path.resolve().name}+{other.best.name}"
        if any(model.title == title for model in shown):
            title = f"{title} ({other.path.resolve().name})"
        shown.append(replace(other.best, title=title, name=name))
    return tuple(shown)


def write_maps(
    source: Source,
    bag_ids: Sequence[str],
    models: Sequence[ScoredModel],
    out: Path,
    *,
    threshold: float,
    longest: int = 1600,
    progress: Progress | None = None,
) -> Path:
    """Write the picture of every bag, and the sheet of the first six.

    Args:
        source: Where the bags are.
        bag_ids: The bags.
        models: Those to show.
        out: Folder to write into.
        threshold: Probability below which maps are transparent.
        longest: Pixels of the longer side of a panel.
        progress: Called with the number of bags done and of all bags.

    Returns:
        The sheet.

    Raises:
        InputError: If there is no bag, or a setting is out of range.
    """
    check_threshold(threshold)
    if not _SMALLEST <= longest <= _LARGEST:
        raise InputError(f"longest is the longer side of a panel, from {_SMALLEST} to {_LARGEST} pixels; got {longest}")
    if not bag_ids:
        raise InputError(f"{source.path}: there are no such bags to draw")
    for done, bag_id in enumerate(bag_ids, start=1):
        row = draw_bag(source, bag_id, models, threshold, longest)
        _save(lay_out([row], threshold), bag_file(out / "bags", bag_id, ".png"))
        if progress is not None:
            progress(done, len(bag_ids))
    rows = [draw_bag(source, bag_id, models, threshold, _SHEET_LONGEST) for bag_id in bag_ids[:SHEET_BAGS]]
    _save(lay_out(rows, threshold), out / SHEET_FILE)
    return out / SHEET_FILE


def write_overlays(
    source: Source,
    bag_ids: Sequence[str],
    models: Sequence[ScoredModel],
    out: Path,
    *,
    threshold: float,
    factor: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the overlays of every bag and model.

    Args:
        source: Where the bags are.
        bag_ids: The bags.
        models: Those to write.
        out: Folder to write into.
        threshold: Probability below which the coloured overlay is transparent.
        factor: Level-0 pixels per pixel of the overlay; None: see `overlay.choose_factor`.
        progress: Called with the number of bags done and of all bags.

    Returns:
        The folder of the overlays.
    """
    check_threshold(threshold)
    folder = out / "overlays"
    for done, bag_id in enumerate(bag_ids, start=1):
        tiles = source.places[bag_id].tiles()
        with open_canvas(tiles) as canvas:
            size = canvas.size
        for model in models:
            scores = model.bag(bag_id)
            ground = Ground(size, tiles.mpp_level0, choose_factor(scores) if factor is None else factor)
            place = folder / model.folder
            write_overlay(bag_file(place / "colour", bag_id, ".ome.tiff"), scores, ground, threshold, model.title)
            write_probability(bag_file(place / "probability", bag_id, ".ome.tiff"), scores, ground, model.title)
        if progress is not None:
            progress(done, len(bag_ids))
    return folder


def _save(picture: Image.Image, path: Path) -> None:
    with atomic_path(path) as temporary:
        picture.save(temporary, "PNG", compress_level=4)

"""Which classes the annotations of slides hold, and whether those that count as tumour are among them."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from its2clr.cohort.parallel import map_in_threads
from its2clr.cohort.slides.annotations import read_shapes
from its2clr.cohort.slides.shapes import EMPTY, Shapes
from its2clr.errors import InputError
from its2clr.wording import did_you_mean, shortened

_LISTED = 20


def check_chosen_classes(
    annotations: Iterable[Path | None], classes: Collection[str], workers: int | None = None
) -> None:
    """Refuse classes that no annotation holds and, where none is chosen, classes of unknown meaning.

    Either would be found slide by slide, after hours of tiling. A file that cannot be read is passed over: tiling says
    why.

    Args:
        annotations: The files; None of slides that have none.
        classes: Those that count as tumour; none: the ones that are known to.
        workers: Threads; the processors at hand if None.

    Raises:
        InputError: With what is there.
    """
    files = list(dict.fromkeys(file for file in annotations if file is not None))
    found = [shapes for shapes in map_in_threads(shapes_of, files, workers) if shapes is not None]
    if not found:
        return
    if not classes:
        unknown = Counter(name for shapes in found if not shapes.is_mask for name in shapes.unknown(None))
        if unknown:
            raise InputError(
                f"it is not known whether these classes are tumour (in {len(found)} annotations: {_counted(unknown)}); "
                "name those that count with --class, the others are then passed over"
            )
        return
    there = list_classes(found)
    for wanted in classes:
        if not any(any(shapes.called(wanted)) for shapes in found):
            names = [name for shapes in found for shape in shapes.named for name in (shape.name, *shape.also) if name]
            hint = did_you_mean(wanted, names) or ";"
            raise InputError(
                f"--class {wanted!r} is in none of the annotations{hint} of {len(found)} annotations there is "
                f"{_counted(there) or 'none with an area'}"
            )


def list_classes(found: Sequence[Shapes]) -> Counter[str]:
    """In how many annotations each class is, as a person would choose it."""
    return Counter(name for shapes in found for name in {shape.shown for shape in shapes.named})


def shapes_of(path: Path) -> Shapes | None:
    """The classes of a file, without their areas; None if it cannot be read."""
    try:
        shapes = read_shapes(path)
    except InputError:
        return None
    return replace(shapes, named=[shape._replace(area=EMPTY) for shape in shapes.named])


def _counted(names: Counter[str]) -> str:
    ordered = sorted(names.items(), key=lambda one: (-one[1], one[0]))
    return shortened([f"{name} in {count}" for name, count in ordered], _LISTED)

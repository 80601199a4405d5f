"""What a person gives to be predicted (cohorts, slides, image folders, features, manifests), sorted into named bags."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from its2clr import far
from its2clr.cohort import LeftOut, read_manifest
from its2clr.cohort.features.feature_manifest import FeatureBag, read_feature_manifest
from its2clr.cohort.features.layouts import SUFFIXES, find_feature_files, read_header
from its2clr.cohort.features.tile_grids import FeatureProblem
from its2clr.cohort.layout import INFO_FILE
from its2clr.cohort.manifest import IMAGE_SUFFIXES, list_images
from its2clr.cohort.slides import Slide, read_slide_manifest
from its2clr.cohort.slides.slide_files import SLIDE_SUFFIXES, find_slides
from its2clr.cohort.tables import read_table
from its2clr.errors import InputError
from its2clr.predict.tiling import Kind

MANIFEST_SUFFIXES = (".csv", ".tsv")
LONGEST_NAME = 150
"""Of a percent-encoded bag_id; the file that is named after it is longer by what is added."""


@dataclass(frozen=True)
class ImageFolder:
    """One bag of ordinary images.

    Attributes:
        bag_id: The bag.
        row: The row of the manifest; 0 if there is none.
        folder: Where the images are, for people.
        files: The images.
        names: Their names.
    """

    bag_id: str
    row: int
    folder: Path
    files: tuple[Path, ...]
    names: tuple[str, ...]


_Bag = TypeVar("_Bag", Slide, ImageFolder, FeatureBag)


@dataclass
class Inputs:
    """Everything that was given, sorted; no two slides, folders or feature files have the same bag_id.

    Attributes:
        cohorts: Folders of packed cohorts.
        slides: Slides to be tiled.
        folders: Folders of images to be packed.
        features: Feature files to be packed.
        left_out: What cannot be predicted, and why.
    """

    cohorts: list[Path] = field(default_factory=list)
    slides: list[Slide] = field(default_factory=list)
    folders: list[ImageFolder] = field(default_factory=list)
    features: list[FeatureBag] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def leave_out(self, path: Path, problem: str, row: int = 0) -> None:
        """Note an input that cannot be predicted."""
        self.left_out.append(LeftOut("", far.address_of(path), row, problem))


def sort_inputs(paths: Iterable[str | Path], kind: Kind) -> Inputs:
    """Sort what a person gave for a model; no label is read.

    Args:
        paths: Cohort folders, slides, folders of slides, folders of images, folders of such folders, manifests.
        kind: What the model takes.

    Raises:
        InputError: A path does not exist, or a manifest is wrong.
    """
    found = Inputs()
    named = list(dict.fromkeys(far.absolute(Path(path)) for path in paths))
    if not named:
        raise InputError("nothing to predict: give cohorts, slides, folders of images, feature files or a manifest")
    for path in named:
        if not (far.is_file(path) or far.is_folder(path)):
            raise InputError(f"{far.address_of(path)}: there is no such file or folder")
    for path in named:
        _sort(path, kind, found)
    found.slides = _with_distinct_names(_once(found.slides), lambda slide: slide.file)
    found.folders = _with_distinct_names(found.folders, lambda one: one.folder)
    features = {one.file.resolve(): one for one in found.features}
    found.features = _with_distinct_names(list(features.values()), lambda one: one.file)
    return found


def distinct_names(named: Sequence[tuple[str, Path]]) -> list[str]:
    """Give each bag a bag_id that no other has, and that can name a file.

    Names that occur once stay. Others get as many of their folders before them as it takes to tell them apart
    (`site-a/case-1`, `site-b/case-1`), so the name of a bag does not depend on the order of the inputs.

    Args:
        named: For each bag its name, and the file or folder it comes from.
    """
    names = [_clean(name) for name, _ in named]
    deepest = max((len(path.parts) for _, path in named), default=0)
    for depth in range(1, deepest + 1):
        repeated = {name for name, count in Counter(names).items() if count > 1}
        if not repeated:
            break
        names = [
            _clean("/".join([*path.parent.parts[-depth:], name])) if now in repeated else now
            for (name, path), now in zip(named, names, strict=True)
        ]
    names = [_cut_to_length(name) for name in names]
    counts = Counter(names)
    return [
        f"{name}~{_digest(str(path))}" if counts[name] > 1 else name
        for name, (_, path) in zip(names, named, strict=True)
    ]


def _sort(path: Path, kind: Kind, found: Inputs) -> None:
    if far.is_file(path / INFO_FILE):
        found.cohorts.append(far.folder_here(path))
    elif far.is_file(path) and path.suffix.lower() in MANIFEST_SUFFIXES:
        _read_manifest(path, kind, found)
    elif kind == "tiles":
        reason = "it is not known how the tiles of the model's own cohort were made (it was resampled)"
        found.leave_out(path, f"{reason}; pack these bags the same way and give the cohort")
    elif kind == "slides":
        _find_slides(path, found)
    elif kind == "features":
        _find_features(path, found)
    else:
        _find_folders(path, found)


def _read_manifest(path: Path, kind: Kind, found: Inputs) -> None:
    if kind == "features":
        listed = read_feature_manifest(path, path.parent, labelled=False)
        found.left_out += listed.left_out
        _add_features(listed.files, found)
        return
    table = read_table(path, [])
    columns = set() if table is None else set(table.columns)
    if kind == "slides" and not ("path" in columns and "file" not in columns):
        slides = read_slide_manifest(path, labelled=False).slides
        # Annotations are ground truth, which is not looked at here.
        found.slides += [replace(slide, annotation=None, unannotated=None) for slide in slides]
    elif kind == "images" and not ("file" in columns and "path" not in columns):
        manifest = read_manifest(path, labelled=False)
        members = dict(iter(manifest.instances.groupby("bag_id", sort=False)))
        for row, bag_id in zip(manifest.bags.index.tolist(), manifest.bags["bag_id"].tolist(), strict=True):
            files = tuple(Path(file) for file in members[bag_id]["file"].tolist())
            names = tuple(members[bag_id]["name"].tolist())
            found.folders.append(ImageFolder(bag_id, row, files[0].parent, files, names))
    else:
        takes = {"slides": "slides", "images": "folders of images", "tiles": "packed cohorts"}[kind]
        found.leave_out(path, f"this manifest does not list what the model takes, which is {takes}")


def _find_features(path: Path, found: Inputs) -> None:
    if far.is_file(path):
        _add_features([FeatureBag(path.stem, 0, path)], found)
        return
    files = find_feature_files(path)
    if not files:
        found.leave_out(
            path, f"there are no feature files ({', '.join(SUFFIXES)}) in this folder, and the model takes features"
        )
    _add_features([FeatureBag(name, 0, file) for name, paths in files.items() for file in paths], found)


def _add_features(bags: Iterable[FeatureBag], found: Inputs) -> None:
    for bag in bags:
        try:
            read_header(bag.file)
        except FeatureProblem as problem:
            found.leave_out(bag.file, str(problem).removeprefix(f"{far.address_of(bag.file)}: "), bag.row)
        else:
            found.features.append(bag)


def _find_slides(path: Path, found: Inputs) -> None:
    if path.suffix.lower() in SUFFIXES and far.is_file(path):
        found.leave_out(path, "holds features, and the model takes slides")
        return
    files = [path] if far.is_file(path) else find_slides(path)
    if not files:
        reason = f"there is no slide in this folder ({', '.join(SLIDE_SUFFIXES)})"
        if any(file.suffix.lower() in IMAGE_SUFFIXES for file in far.files_below(path)):
            reason += "; it holds images, and the model is for slides"
        found.leave_out(path, reason)
    found.slides += [Slide(file.stem or file.name, row=0, file=file, name=far.address_of(file)) for file in files]


def _find_folders(path: Path, found: Inputs) -> None:
    if far.is_file(path):
        found.leave_out(path, "is one file, and the model is for bags of images: put the images of a bag into a folder")
        return
    folders = [path]
    if not list_images(path):
        folders = far.folders_in(path)
        if not any(list_images(one) for one in folders):
            kinds = ", ".join(IMAGE_SUFFIXES)
            found.leave_out(path, f"there are no images in this folder, nor in the folders directly in it ({kinds})")
            return
    for folder in folders:
        files = tuple(list_images(folder))
        if not files:
            found.leave_out(folder, "there are no images directly in this folder")
            continue
        found.folders.append(ImageFolder(folder.name, 0, folder, files, tuple(file.name for file in files)))


def _once(slides: list[Slide]) -> list[Slide]:
    """One bag per slide that was given twice, say itself and in a folder; what a manifest says about it is kept."""
    known: dict[Path, Slide] = {}
    for slide in slides:
        place = slide.file.resolve()
        if place not in known or slide.row > known[place].row:
            known[place] = slide
    return list(known.values())


def _with_distinct_names(bags: list[_Bag], place: Callable[[_Bag], Path]) -> list[_Bag]:
    names = distinct_names([(bag.bag_id, place(bag)) for bag in bags])
    return [replace(bag, bag_id=name) for bag, name in zip(bags, names, strict=True)]


def _clean(name: str) -> str:
    """A name without what a table would lose: bytes that are not text, line ends, blanks around it."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() else " " for letter in text).strip() or "bag"


def _cut_to_length(name: str) -> str:
    if len(quote(name, safe="")) <= LONGEST_NAME:
        return name
    short = name
    while len(quote(short, safe="")) > LONGEST_NAME - 9:
        short = short[:-1]
    return f"{short}~{_digest(name)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:8]

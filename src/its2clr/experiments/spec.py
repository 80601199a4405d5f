"""What an experiment is: a table or figure of the paper, as data that is read from `specs/` and checked."""

import re
from collections.abc import Collection
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, model_validator

from its2clr.config import Section
from its2clr.errors import InputError
from its2clr.settings import resolve_config, settings_by_key
from its2clr.wording import did_you_mean

Stage = Literal["pretrain", "aggregate", "refine", "end_to_end"]
Kind = Literal["table", "curves", "training", "sweep", "histogram", "maps", "examples", "drawing"]


BASE_DATASET = "camelyon16"
"""The dataset of cells that name none."""
OF_A_DATASET = (
    "aggregator.name",
    "aggregator.balanced",
    "refine.threshold",
    "refine.initial_ratio",
    "refine.final_ratio",
    "refine.positive_fraction",
)
"""What a dataset is in budgets other than the paper's: its aggregator, and the settings in Table:hyperparameter."""


class Resampling(Section):
    """How the given cohort is changed before anything is trained."""

    keep_negatives: float = 1.0
    keep_positives: float = 1.0
    sub_bags: bool = False

    @property
    def name(self) -> str:
        """Short name for folders; empty for the cohort as it is."""
        parts = [f"neg{self.keep_negatives:g}"] * (self.keep_negatives < 1)
        parts += [f"pos{self.keep_positives:g}"] * (self.keep_positives < 1) + ["sub-bags"] * self.sub_bags
        return "-".join(parts)


def _resampling(value: Any) -> Any:
    return {"sub_bags": True} if value == "sub_bags" else value


class Cell(Section):
    """Where a number comes from; a table's cell has the keys of its row, of its column and of the table together.

    Attributes:
        method: Name in methods.yaml.
        start: Name in starts.yaml of another start than the budget's own.
        dataset: Name in datasets.yaml: its settings and the cohort given for it.
        cohort: Change of the cohort.
        aggregator: Trained on the frozen features; None: the run's.
        metric: Name in `its2clr.experiments.metrics`.
        setting: Instead of a metric: the value of this setting.
        round: Which round's instance predictions, for metrics of the training bags.
        values: Further settings, by dotted key.
        missing: Why there is no number.
    """

    method: str | None = None
    start: str | None = None
    dataset: str = BASE_DATASET
    cohort: Annotated[Resampling, BeforeValidator(_resampling)] = Resampling()
    aggregator: str | None = None
    metric: str | None = None
    setting: str | None = None
    round: Literal["first", "best"] = "best"
    values: dict[str, Any] = Field(default_factory=dict)
    missing: str | None = None

    def with_(self, *parts: "Cell") -> "Cell":
        """This cell with the keys of some parts instead of its own; no two parts may differ in a key."""
        merged: dict[str, Any] = {}
        for part in parts:
            for key, value in part.model_dump(exclude_unset=True).items():
                if merged.setdefault(key, value) != value:
                    raise ValueError(f"two values for {key}: {merged[key]!r} and {value!r}")
        return Cell.model_validate(self.model_dump(exclude_unset=True) | merged)


class Number(Section):
    """A number of the paper, with its deviation if it has one."""

    mean: float
    std: float | None = None


def _number(value: Any) -> Any:
    if isinstance(value, int | float):
        return {"mean": value}
    if isinstance(value, str) and (match := re.fullmatch(r"([\d.]+) ± ([\d.]+)", value)):
        return {"mean": float(match[1]), "std": float(match[2])}
    return value


class Sweep(Section):
    """One setting over several values."""

    setting: str
    values: list[float]


def _group(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    groups = _read_file("groups.yaml")
    if value not in groups:
        raise ValueError(f"no group named {value!r}{did_you_mean(value, groups, else_list=True)}")
    return groups[value]


Cells = Annotated[dict[str, Cell], BeforeValidator(_group)]
"""Cells by name, or the name of a group in groups.yaml."""


class Experiment(Section):
    """A table or figure of the paper.

    Attributes:
        label: Its label in the paper's source.
        title: What it shows.
        position: Where it stands on the page.
        kind: How it is put together and drawn.
        paper_data: What the paper's numbers were measured on.
        about: What a reader of the numbers should know.
        scale: Factor from our numbers to the paper's unit.
        digits: Decimals shown.
        cell: What all cells have in common.
        rows: Names and cells of the rows (tables).
        columns: Names and cells of the columns (tables).
        lines: Names and cells of the lines or panels (figures).
        sweeps: Names and settings of the panels (sweeps).
        y: Fields of a round and their axis titles (curves).
        bags: Quantiles of the test bags shown (maps).
        methods: Whether methods are compared along the columns or the rows.
        reference: The row or column that the others are compared with.
        paper: The paper's numbers by row; null where a row or column is none of the paper's.
    """

    label: str = Field(pattern=r"^[A-Za-z0-9][\w:.-]*$")
    title: str
    position: int = 100
    kind: Kind
    paper_data: str
    about: str = ""
    scale: float = 100.0
    digits: int = 2
    cell: Cell = Cell()
    rows: Cells = Field(default_factory=dict)
    columns: Cells = Field(default_factory=dict)
    lines: Cells = Field(default_factory=dict)
    sweeps: dict[str, Sweep] = Field(default_factory=dict)
    y: dict[str, str] = Field(default_factory=dict)
    bags: list[float] = Field(default_factory=list)
    methods: Literal["rows", "columns"] | None = None
    reference: str | None = None
    paper: dict[str, list[Annotated[Number | None, BeforeValidator(_number)]]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _complete(self) -> "Experiment":
        if self.kind == "table" and self.paper:
            if list(self.paper) != list(self.rows):
                raise ValueError("the paper's rows and ours differ")
            for row, numbers in self.paper.items():
                if len(numbers) != len(self.columns):
                    raise ValueError(f"row {row!r} has {len(numbers)} numbers for {len(self.columns)} columns")
        if self.methods is not None:
            along = self.rows if self.methods == "rows" else self.columns
            if self.reference not in along:
                raise ValueError(f"reference {self.reference!r} is none of {list(along)}")
        return self

    @property
    def folder(self) -> str:
        """Name of its folder: the label without a colon."""
        return self.label.replace(":", "-")

    def number(self, row: str, column: str) -> Number | None:
        """The paper's number of a cell; None if it has none."""
        return self.paper[row][list(self.columns).index(column)] if self.paper else None

    def cells(self) -> dict[tuple[str, str], Cell]:
        """Every cell by its row and column; the column of a line is empty."""
        if self.kind == "table":
            return {
                (row, column): self.cell.with_(left, right)
                for row, left in self.rows.items()
                for column, right in self.columns.items()
            }
        if self.kind == "sweep":
            return {
                (name, f"{value:g}"): self.cell.with_(Cell(values={sweep.setting: value}))
                for name, sweep in self.sweeps.items()
                for value in sweep.values
            }
        return {(name, ""): self.cell.with_(line) for name, line in self.lines.items()}


class Method(Section):
    """What is run from the start."""

    stage: Stage
    values: dict[str, Any] = Field(default_factory=dict, alias="set")


class Dataset(Section):
    """A dataset of the paper: its recipe, and what differs from it."""

    recipe: str
    values: dict[str, Any] = Field(default_factory=dict, alias="set")


class Budget(Section):
    """How much is trained.

    Attributes:
        about: Printed on every page made with it.
        recipe: Recipe the settings start from.
        whole_recipes: Whether a column that is a dataset has all settings of its recipe; otherwise `OF_A_DATASET`.
        values: Settings that replace some of it.
        embedded: Size and settings of the embedded cohort that is drawn when no cohort is given.
        starts: Settings that replace some of a start in starts.yaml.
        sub_bag_size: Instances of a sub-bag where an experiment wants sub-bags.
        seeds: Training seeds unless told otherwise.
    """

    about: str
    recipe: str
    whole_recipes: bool = False
    values: dict[str, Any] = Field(default_factory=dict, alias="set")
    embedded: dict[str, Any] | None = None
    starts: dict[str, dict[str, Any]] = Field(default_factory=dict)
    sub_bag_size: int = 500
    seeds: int = 1


@cache
def experiments() -> dict[str, Experiment]:
    """Every experiment by its label, in the order of the page."""
    folder = resources.files("its2clr.experiments").joinpath("specs")
    found = [Experiment.model_validate(_read(path.read_text(encoding="utf-8"))) for path in folder.iterdir()]
    return {spec.label: spec for spec in sorted(found, key=lambda spec: (spec.position, spec.label))}


@cache
def methods() -> dict[str, Method]:
    """The methods by name."""
    return {name: Method.model_validate(value) for name, value in _read_file("methods.yaml").items()}


@cache
def datasets() -> dict[str, Dataset]:
    """The datasets of the paper by name."""
    return {name: Dataset.model_validate(value) for name, value in _read_file("datasets.yaml").items()}


@cache
def dataset_settings(name: str) -> dict[str, Any]:
    """All settings of a dataset, by dotted key."""
    dataset = datasets()[name]
    return settings_by_key(resolve_config(dataset.recipe, dataset.values))


@cache
def starts() -> dict[str, dict[str, Any]]:
    """The starting points other than the budget's own, by name."""
    return _read_file("starts.yaml")


def read_budget(name: str) -> Budget:
    """A budget by name."""
    return Budget.model_validate(_read_file(f"budgets/{name}.yaml"))


def read_experiment(path: Path) -> Experiment:
    """A table or figure of the user's own, described like those in `specs/`.

    Raises:
        InputError: The file is not there, or is not such a description.
    """
    from its2clr.experiments.metrics import metric_names

    if not path.is_file():
        raise InputError(f"no file {path}")
    try:
        own = Experiment.model_validate(_read(path.read_text(encoding="utf-8")))
        cells = own.cells()
    except (ValueError, yaml.YAMLError) as error:
        raise InputError(f"{path}: not a table or figure as `reproduce` takes them: {error}") from error
    known: dict[str, Collection[str]]
    known = {"method": methods(), "start": starts(), "dataset": datasets(), "metric": metric_names()}
    for place, cell in cells.items():
        where = f"{path}: {', '.join(filter(None, place))}"
        unnumbered = own.kind == "table" and cell.metric is None and cell.setting is None
        if cell.missing is None and (cell.method is None or unnumbered):
            raise InputError(f"{where}: names no {'method' if cell.method is None else 'metric'}")
        for what, names in known.items():
            if (named := getattr(cell, what)) is not None and named not in names:
                raise InputError(f"{where}: no {what} named {named!r}{did_you_mean(named, names, else_list=True)}")
    return own


def select(names: list[str]) -> list[Experiment]:
    """Experiments by label; `all` is every one, `tab:diffpretrained` both of its parts, `FILE.yaml` one of your own.

    Raises:
        InputError: A label is unknown (the closest is named), or the file holds no experiment.
    """
    chosen: dict[str, Experiment] = {}
    for name in names:
        if name.endswith(".yaml"):
            own = read_experiment(Path(name))
            chosen[own.label] = own
            continue
        parts = {
            label: spec
            for label, spec in experiments().items()
            if name in ("all", label) or (name == "tab:diffpretrained" and label.startswith(f"{name}_"))
        }
        if not parts:
            hint = did_you_mean(name, experiments())
            raise InputError(f"no table or figure {name!r}{hint or ';'} `its2clr reproduce --list` shows them all")
        chosen |= parts
    return list(chosen.values())


def _read_file(name: str) -> dict[str, Any]:
    return _read(resources.files("its2clr.experiments").joinpath(name).read_text(encoding="utf-8"))


def _read(text: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(text)
    return values

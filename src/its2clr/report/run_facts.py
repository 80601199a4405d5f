"""Everything a report tells, gathered from the files of a run in whatever state it is.

What is missing is None; what cannot be read is None too, and the problems say so. Without `results.json` nothing about
the test bags is read but how many there are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from its2clr.cohort import Cohort
from its2clr.cohort.identity import said_changes
from its2clr.cohort.layout import PROBLEMS_FILE
from its2clr.config import RunConfig
from its2clr.errors import InputError, Its2clrError
from its2clr.evaluation.arrays import both_classes
from its2clr.evaluation.health import warnings_of
from its2clr.files import read_json, read_metrics
from its2clr.refine.remedies import said_retry
from its2clr.report.run_state import State, state_of
from its2clr.run.decisions import Thresholds, read_thresholds
from its2clr.run.handover import preferred_encoders
from its2clr.run.made_from import outdated, read_made_from
from its2clr.run.names import ENCODERS, encoder_names
from its2clr.run.results_file import describe_rounds, measured, read_retries, read_rounds, rounds_health
from its2clr.run.saved import require_run_config
from its2clr.run.scores import BAG_PREDICTIONS_FILE, PREDICTIONS_FILE, RESULTS_FILE, Model

T = TypeVar("T")
UNREADABLE = (Its2clrError, OSError, ValueError, KeyError, TypeError, IndexError, AttributeError)
"""What damaged or foreign files may raise."""


@dataclass(frozen=True, eq=False)
class Scored:
    """What one model says about the bags, and about the instances of the test bags.

    Attributes:
        model: Encoder and aggregator.
        name: What the page calls it.
        found: What `results.json` says about it; empty if nothing.
        bags: `bag_id`, `label`, `split`, `probability` of every bag.
        instances: `bag_id`, `instance`, `label` and `probability` of every test instance; None if not there.
        thresholds: From which probability on it says positive; None if that cannot be read.
    """

    model: Model
    name: str
    found: dict[str, Any]
    bags: pd.DataFrame
    instances: pd.DataFrame | None
    thresholds: Thresholds | None = None

    def split(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Labels and probabilities of the bags of one split."""
        part = self.bags[self.bags["split"] == name]
        return part["label"].to_numpy(dtype=np.int64), part["probability"].to_numpy(dtype=np.float64)

    def known_instances(self) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
        """Ground truth and probability of the test instances of known class; None unless both classes are there."""
        if self.instances is None or not both_classes(self.instances["label"]):
            return None
        known = self.instances[self.instances["label"] >= 0]
        return known["label"].to_numpy(dtype=np.int64), known["probability"].to_numpy(dtype=np.float64)


class Decisions(NamedTuple):
    """How many bags are called right and wrong at a threshold."""

    threshold: float
    true_positives: int
    false_negatives: int
    true_negatives: int
    false_positives: int

    @property
    def sensitivity(self) -> float:
        """Share of the positives that are called positive."""
        return self.true_positives / max(1, self.true_positives + self.false_negatives)

    @property
    def specificity(self) -> float:
        """Share of the negatives that are called negative."""
        return self.true_negatives / max(1, self.true_negatives + self.false_positives)


@dataclass(eq=False)
class RunFacts:
    """A run as its report tells it.

    Attributes:
        run: Its folder.
        config: Its settings.
        cohort_path: Where its cohort is or was.
        state: How far it has come.
        metrics: What it logged per epoch.
        results: The content of `results.json`.
        cohort: Its cohort; without the test bags if the run was not evaluated.
        unseen: The test bags of a run that was not evaluated, without labels.
        models: What was evaluated, the run's own aggregator first.
        rounds: The rounds of its refinement.
        health: What bag labels alone tell about the pseudo labels.
        left_out: How many rows the cohort's `problems.csv` has.
        problems: What could not be read.
    """

    run: Path
    config: RunConfig
    cohort_path: Path
    state: State
    metrics: list[dict[str, Any]]
    results: dict[str, Any] | None = None
    cohort: Cohort | None = None
    unseen: Cohort | None = None
    models: list[Scored] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    health: dict[str, Any] | None = None
    left_out: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def best(self) -> Scored | None:
        """The model a reader wants: the encoder that is handed over, with the run's aggregator, or what there is."""
        own = self.config.aggregator.name
        wanted = [Model(encoder, own) for encoder in preferred_encoders(self.run)]
        found = {scored.model: scored for scored in self.models}
        return next((found[model] for model in wanted if model in found), self.models[0] if self.models else None)

    def attempt(self, what: str, work: Callable[[], T]) -> T | None:
        """What `work` gives; None, and a sentence among the problems, when files are damaged or missing."""
        try:
            return work()
        except UNREADABLE as error:
            first = str(error).partition("\n")[0]
            self.problems.append(f"{what} cannot be shown: {type(error).__name__}: {first}")
            return None


def collect(run: str | Path) -> RunFacts:
    """Gather what there is of a run.

    Raises:
        InputError: The folder is no run.
    """
    folder = Path(run)
    config, cohort_path = require_run_config(folder)
    metrics = [
        entry for entry in read_metrics(folder) if isinstance(entry, dict) and {"stage", "epoch"} <= entry.keys()
    ]
    facts = RunFacts(folder, config, cohort_path, state_of(folder, config, metrics), metrics)
    if (folder / RESULTS_FILE).is_file():
        facts.results = facts.attempt(RESULTS_FILE, lambda: dict(read_json(folder / RESULTS_FILE)))
    whole = facts.attempt("The cohort", lambda: Cohort.open(cohort_path))
    if whole is not None and facts.results is not None:
        facts.cohort = whole
    elif whole is not None:
        facts.cohort = facts.attempt("The cohort", whole.without_test)
        if (whole.bags["split"] == "test").any():
            facts.unseen = whole.split("test").without_labels()
    if whole is not None:
        facts.attempt("What the run was made from", lambda: _note_changes(facts, whole))
    problems = cohort_path / PROBLEMS_FILE
    if problems.is_file():
        facts.left_out = facts.attempt("problems.csv", lambda: len(pd.read_csv(problems, dtype=str))) or 0
    if facts.results is not None:
        results = facts.results
        instances = facts.attempt("Predictions of instances", lambda: _instances(folder)) or {}
        facts.models = facts.attempt("Predictions of bags", lambda: _models(facts, results, instances)) or []
        facts.rounds = facts.attempt("Rounds", lambda: _rounds_of_results(results)) or []
        facts.health = results.get("health")
    else:
        found = facts.attempt("Rounds", lambda: rounds_of_training(folder, facts.cohort, config))
        facts.rounds, facts.health = found or ([], None)
    return facts


def _note_changes(facts: RunFacts, cohort: Cohort) -> None:
    """Say among the problems what has changed since the run was evaluated or, before that, since it began."""
    if facts.results is not None:
        lines = outdated(facts.run, facts.config, facts.results, cohort)
        if lines:
            words = "The results below are out of date: cohort or models have changed since they were measured."
            facts.state = replace(facts.state, name="outdated", words=words, command=None)
    else:
        before = read_made_from(facts.run)
        changes = [] if before is None else cohort.without_test().identity().changes_since(before.without_test())
        lines = [f"the cohort has changed since the run began: {line}" for line in said_changes(changes)]
    facts.problems += lines


def called_at_validation(models: Sequence[Scored]) -> dict[str, Decisions]:
    """Each model's test bags called at its threshold, which its validation bags chose, by the name of the model."""
    found = {}
    for scored in models:
        test = scored.split("test")
        if scored.thresholds is not None and test[0].size:
            found[scored.name] = _decisions(*test, scored.thresholds.bag)
    return found


def rounds_of_training(
    run: Path, cohort: Cohort | None, config: RunConfig
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The rounds of a run that was not evaluated, and its health; nothing about the test bags is read.

    Args:
        run: Folder of the run.
        cohort: Its training and validation bags; None leaves out what needs their labels.
        config: Its settings.
    """
    rounds = read_rounds(run)
    if cohort is None or not rounds:
        return [one.metrics for one in rounds], None
    train = cohort.split("train")
    labels = train.bags["label"].to_numpy(dtype=np.int64)
    health = rounds_health(rounds, labels, train.offsets(), config.refine.threshold)
    described = [
        {**healthy, **found} for healthy, found in zip(health["rounds"], describe_rounds(rounds, train), strict=True)
    ]
    retries = read_retries(run)
    warnings = [*map(said_retry, retries), *warnings_of(health)]
    return described, {**health, "final": health["rounds"][-1], "retries": retries, "warnings": warnings}


def _rounds_of_results(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The rounds of `results.json`, quality and health together."""
    rounds, health = results.get("rounds", []), results.get("health", {}).get("rounds", [])
    healthy = health if len(health) == len(rounds) else [{}] * len(rounds)
    return [{**of_health, **found} for found, of_health in zip(rounds, healthy, strict=True)]


def _decisions(labels: NDArray[np.int64], scores: NDArray[np.float64], threshold: float) -> Decisions:
    """Counts when scores >= threshold are called positive."""
    called, positive = scores >= threshold, labels == 1
    return Decisions(
        threshold,
        int((called & positive).sum()),
        int((~called & positive).sum()),
        int((~called & ~positive).sum()),
        int((called & ~positive).sum()),
    )


def _models(facts: RunFacts, results: dict[str, Any], instances: dict[Model, pd.DataFrame]) -> list[Scored]:
    run, config = facts.run, facts.config
    text = {"bag_id": str, "group": str, "encoder": str, "aggregator": str, "split": str}
    table = pd.read_csv(run / BAG_PREDICTIONS_FILE, dtype=text, keep_default_na=False)
    own, names = config.aggregator.name, encoder_names(config)
    order = {name: place for place, name in enumerate(ENCODERS)}
    models = sorted(
        (Model(*pair) for pair in table[["encoder", "aggregator"]].drop_duplicates().itertuples(index=False)),
        key=lambda model: (model.aggregator != own, model.aggregator, order.get(model.encoder, len(order))),
    )
    scored = []
    for model in models:
        bags = table[(table["encoder"] == model.encoder) & (table["aggregator"] == model.aggregator)]
        name = f"{names.get(model.encoder, model.encoder)} + {model.aggregator}"
        thresholds = facts.attempt(f"Decisions of {name}", partial(read_thresholds, run, config, results, model))
        scored.append(Scored(model, name, measured(results, model), bags, instances.get(model), thresholds))
        wanted = results.get("cohort", {}).get("splits", {}).get("test", {}).get("bags")
        there = int((bags["split"] == "test").sum())
        if wanted is not None and there != wanted:
            raise InputError(f"{BAG_PREDICTIONS_FILE} has {there} test bags of {name}, {RESULTS_FILE} has {wanted}")
    return scored


def _instances(run: Path) -> dict[Model, pd.DataFrame]:
    path = run / PREDICTIONS_FILE
    if not path.is_file():
        return {}
    columns = ["encoder", "aggregator", "bag_id", "instance", "label", "probability"]
    table = pd.read_parquet(path, columns=columns, filters=[("split", "==", "test")])
    return {Model(*map(str, pair)): part for pair, part in table.groupby(["encoder", "aggregator"], observed=True)}

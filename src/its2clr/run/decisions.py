"""From which probability on a model calls a bag, and an instance, positive: chosen once, read by everything.

`evaluate` chooses both on the validation bags and writes them into `results.json`; the model file carries them on. What
calls anything positive (command line, report, maps, GeoJSON, viewer, `ItS2CLR.predict`) reads them here.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from its2clr.config import RefineConfig, RunConfig
from its2clr.errors import InputError
from its2clr.evaluation.arrays import both_classes
from its2clr.evaluation.thresholds import balanced_accuracy_threshold
from its2clr.files import damage_said
from its2clr.run.names import REFINED
from its2clr.run.results_file import measured
from its2clr.run.scores import BAG_PREDICTIONS_FILE, Model, Scores

if TYPE_CHECKING:
    from its2clr.bags import Bags

USUAL_INSTANCE_THRESHOLD: float = RefineConfig.model_fields["threshold"].default
"""For instances, where a model or predictions of an older version do not say it: the paper's eta."""


class Thresholds(NamedTuple):
    """Probabilities from which on a model says positive (probability >= threshold).

    Attributes:
        bag: For the mean bag probability of the retrained aggregators: best balanced accuracy on the validation bags.
        instance: For their mean instance probability: eta, as `refine.threshold_rule` sets it on validation bags.
    """

    bag: float
    instance: float


def choose_thresholds(config: RefineConfig, validation: "Bags", scores: Scores) -> Thresholds:
    """Choose a model's thresholds.

    Args:
        config: Says how eta is set.
        validation: Validation bags.
        scores: What the model says about them.

    Raises:
        InputError: The validation bags are of one class.
    """
    from its2clr.refine.rounds import threshold_by_rule

    return Thresholds(
        balanced_accuracy_threshold(validation.labels, scores.bag_probability),
        threshold_by_rule(config, validation, scores.instance_probability),
    )


def read_thresholds(run: Path, config: RunConfig, results: dict[str, Any], model: Model) -> Thresholds:
    """The thresholds of an evaluated model.

    An older version did not store them; they follow from the table of bags and from what it said about the last
    pseudo labels.

    Args:
        run: Folder of the run.
        config: Its settings.
        results: The content of its `results.json`.
        model: Which model.

    Raises:
        InputError: The run was evaluated by an older version, which did not predict validation bags.
    """
    stored = measured(results, model).get("thresholds")
    if stored is not None:
        return Thresholds(float(stored["bag"]), float(stored["instance"]))
    instance = config.refine.threshold
    if model == Model(REFINED, config.aggregator.name):
        instance = results.get("health", {}).get("final", {}).get("threshold", instance)
    return Thresholds(_bag_threshold(run, model), float(instance))


def _bag_threshold(run: Path, model: Model) -> float:
    path = run / BAG_PREDICTIONS_FILE
    with damage_said(f"{path}: is damaged", "restore it, or run `its2clr evaluate` again"):
        table = pd.read_csv(path, dtype={"encoder": str, "aggregator": str}, converters={"probability": float})
        of_model = (table["encoder"] == model.encoder) & (table["aggregator"] == model.aggregator)
        chosen = table[of_model & (table["split"] == "val")]
        labels, probability = chosen["label"].to_numpy(dtype=np.int64), chosen["probability"].to_numpy()
    if not both_classes(labels):
        raise InputError(
            f"{run}: evaluated by an older version of its2clr, which did not predict validation bags; run "
            f"`its2clr evaluate {run}` again"
        )
    return balanced_accuracy_threshold(labels, probability)

"""The metrics that a cell may show, and where they are in the results of a run."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from its2clr.errors import InputError
from its2clr.evaluation.bags import BAG_METRICS
from its2clr.evaluation.instances import INSTANCE_METRICS
from its2clr.run.names import END_TO_END, REFINED, START
from its2clr.wording import did_you_mean

ENCODER_OF_STAGE = {"aggregate": START, "refine": REFINED, "end_to_end": END_TO_END}

_OF_MODEL: dict[str, Mapping[str, Any]] = {"bag": BAG_METRICS, "instance": INSTANCE_METRICS}
OF_FEATURES = {
    **{f"probe_{name}": ("linear_probe", name) for name in ("auc", "auprc", "max_f1", "dice", "bag_auc")},
    **{
        f"{split}_{name}": ("class_separation", split, name)
        for split in ("train", "test")
        for name in ("inter_class_distance", "positive_deviation", "negative_deviation")
    },
}
"""Metrics of the frozen features, not of a model on them."""
_OF_ROUND = {"training_instance_auc": "instance_auc", "training_instance_max_f1": "instance_max_f1"}
_OF_TIME = {"refine_time_share", "round_time_share"}
VALIDATION_AUC = "validation_auc"
"""Bag AUC on the validation bags in the round whose encoder was kept: what settings may be chosen by."""
SWEPT = {"bag_auc": "test bag AUC", "instance_auc": "test instance AUC", VALIDATION_AUC: "validation bag AUC"}
"""What a sweep shows: validation beside test, so that nobody chooses a setting by its test numbers."""

NO_TRUTH = "needs instance labels of both classes in every split"
NOT_MEASURED = "not measured in this run"


class Value(NamedTuple):
    """A number of one run, with its deviation over retrainings if it has one."""

    mean: float
    std: float | None = None


def metric_names() -> set[str]:
    """Every metric that a cell may show."""
    of_model = {f"{part}_{name}" for part, metrics in _OF_MODEL.items() for name in metrics}
    return {"witness_rate", VALIDATION_AUC, *of_model, *OF_FEATURES, *_OF_ROUND, *_OF_TIME}


def read_metric(
    results: Mapping[str, Any], stage: str, metric: str, aggregator: str | None, round_: str, pretrain_seconds: float
) -> Value | str:
    """A metric in the results of a run, or why it is not there.

    Args:
        results: Content of results.json.
        stage: Stage of the run.
        metric: Name of the metric.
        aggregator: Name of an aggregator other than the run's own, or None.
        round_: "first" or "best", for metrics of a round.
        pretrain_seconds: How long the pretraining it started from took.

    Raises:
        InputError: The metric has no such name.
    """
    if metric not in metric_names():
        raise InputError(f"no metric named {metric!r}{did_you_mean(metric, metric_names())}")
    if metric == "witness_rate":
        return _value(results["cohort"].get("witness_rate"))
    encoder = results[ENCODER_OF_STAGE[stage]]
    part, _, name = metric.partition("_")
    if part in _OF_MODEL:
        found = encoder.get("test") if aggregator is None else encoder.get("aggregators", {}).get(aggregator)
        missing = found is None or (part == "bag" and name not in found["bag"])
        return NOT_MEASURED if missing else _value(_at(found, (part, name)))
    if metric in OF_FEATURES:
        return _value(_at(encoder, OF_FEATURES[metric]))
    rounds = results.get("rounds", [])
    if metric == VALIDATION_AUC:
        return _value(results.get("refine", {}).get("best_validation_auc"))
    if metric in _OF_ROUND:
        best = [entry for entry in rounds if entry["improved"]][-1]
        return _value((rounds[0] if round_ == "first" else best).get(_OF_ROUND[metric]))
    seconds = results["seconds"]
    spent = seconds["refine"] if metric == "refine_time_share" else seconds["round"] / len(rounds)
    return Value(spent / pretrain_seconds) if pretrain_seconds else "the pretraining was not trained here"


def _at(values: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    found: Any = values
    for part in path:
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _value(found: Any) -> Value | str:
    if found is None:
        return NO_TRUTH
    if isinstance(found, Mapping):
        return Value(found["mean"], found["std"] if len(found["values"]) > 1 else None)
    return Value(float(found)) if found == found else NO_TRUTH  # noqa: PLR0124 (nan)

"""Numbers a lab can defend: bag and instance metrics, intervals over bags, health without truth."""

from its2clr.evaluation.bag import bag_metrics
from its2clr.evaluation.bootstrap import (
    Interval,
    bag_auc_difference_interval,
    bag_auc_interval,
    bag_metric_intervals,
    bootstrap_interval,
    instance_auc_interval,
)
from its2clr.evaluation.dice import DiceFit, fit_dice, soft_dice
from its2clr.evaluation.health import (
    SeedAgreement,
    churn,
    contrast_auc,
    false_positive_share,
    health_report,
    median_auc,
    positive_share,
    seed_agreement,
    start_kept,
    warnings_of,
)
from its2clr.evaluation.instance import instance_metrics
from its2clr.evaluation.linear_probe import LinearProbe, linear_probe, linear_probe_metrics
from its2clr.evaluation.pseudo_labels import pseudo_label_quality
from its2clr.evaluation.retrainings import Summary, summarise
from its2clr.evaluation.separation import ClassSeparation, class_separation

__all__ = [
    "ClassSeparation",
    "DiceFit",
    "Interval",
    "LinearProbe",
    "SeedAgreement",
    "Summary",
    "bag_auc_difference_interval",
    "bag_auc_interval",
    "bag_metric_intervals",
    "bag_metrics",
    "bootstrap_interval",
    "churn",
    "class_separation",
    "contrast_auc",
    "false_positive_share",
    "fit_dice",
    "health_report",
    "instance_auc_interval",
    "instance_metrics",
    "linear_probe",
    "linear_probe_metrics",
    "median_auc",
    "positive_share",
    "pseudo_label_quality",
    "seed_agreement",
    "soft_dice",
    "start_kept",
    "summarise",
    "warnings_of",
]

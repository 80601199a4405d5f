"""What a report says in words: what the numbers mean and what may be claimed, and the settings as they are typed."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml

from its2clr.config import RefineConfig, RunConfig
from its2clr.evaluation import health as limits
from its2clr.evaluation.uncertainty import has_spread
from its2clr.refine.corrections import FILE as CORRECTIONS
from its2clr.report.run_facts import Decisions, RunFacts, Scored
from its2clr.run.handover import said
from its2clr.run.names import REFINED, START
from its2clr.settings import flatten, recipe_names, resolve_config

FEW_BAGS = 20
"""With fewer test bags of a class, one bag is more than five points of sensitivity or specificity."""
STAGE_NAMES = {"pretrain": "Pretraining", "refine": "Refinement", "end_to_end": "End-to-end training"}


class Check(NamedTuple):
    """One number of the health report: what it is, its value, the limit beyond which to look at it, and what to do."""

    name: str
    value: str
    limit: str
    worrying: bool
    meaning: str


class Setting(NamedTuple):
    """One setting: its dotted key, its value in this run, and the default."""

    key: str
    value: str
    default: str


def headline(facts: RunFacts, decisions: dict[str, Decisions]) -> list[str]:
    """The results of an evaluated run in a few sentences; the most important first."""
    best = facts.best
    if best is None or "bag_auc" not in best.found:
        return []
    labels, _ = best.split("test")
    positive, negative = int((labels == 1).sum()), int((labels == 0).sum())
    own = facts.config.aggregator.name
    by_encoder = {scored.model.encoder: scored for scored in facts.models if scored.model.aggregator == own}
    start, refined = by_encoder.get(START), by_encoder.get(REFINED)
    first = (
        f"On {labels.size:,} test bags ({positive:,} positive, {negative:,} negative) that no training step saw, "
        f"{best.name} ranks bags with an AUC of {_with_interval(best.found, 'bag_auc')}: a positive bag gets a higher "
        f"score than a negative one {best.found['bag_auc']:.1%} of the time (50% would be guessing)."
    )
    sentences = [first]
    if start is not None and refined is not None and "bag_auc" in start.found and "bag_auc" in refined.found:
        sentences.append(_gain(facts.results or {}, start, refined))
    if facts.results is not None and "hand_over" in facts.results:
        sentences.append(f"Do no harm: {said(facts.results['hand_over'])}.")
    called = decisions.get(best.name)
    if called is not None:
        sentences.append(
            f"At the threshold chosen on the validation bags ({called.threshold:.2f}), it finds "
            f"{called.true_positives:,} of {positive:,} positive bags (sensitivity {called.sensitivity:.0%}) and "
            f"clears {called.true_negatives:,} of {negative:,} negative ones (specificity {called.specificity:.0%})."
        )
    if "instance_auc" in best.found:
        before = ""
        if start is not None and start is not best and "instance_auc" in start.found:
            before = f", against {_with_interval(start.found, 'instance_auc')} before"
        sentences.append(
            f"Inside the bags, against ground truth that training did not see, it ranks instances with an AUC of "
            f"{_with_interval(best.found, 'instance_auc')}{before}."
        )
    if min(positive, negative) < FEW_BAGS:
        sentences.append(
            f"This is a small test: one bag is {1 / max(1, min(positive, negative)):.0%} of its class. Trust the "
            "intervals, not the third digit, and expect other numbers from another split."
        )
    return sentences


def unfinished(facts: RunFacts) -> list[str]:
    """What a report of a run that was not evaluated can say."""
    sentences = ["This page was made without looking at test bags: their labels are read once, by its2clr evaluate."]
    if facts.rounds:
        best = [found["epoch"] for found in facts.rounds if found["improved"]][-1]
        sentences.append(rounds_words(facts.rounds, best, "is kept so far"))
    return sentences


def rounds_words(rounds: Sequence[dict[str, Any]], best_epoch: int, kept: str = "was kept") -> str:
    """Which round's encoder was kept, beside the first and the last: the kept one alone would hide a later fall."""
    aucs = {found["epoch"]: found["validation_auc"] for found in rounds}
    first, last = min(aucs), max(aucs)
    return (
        f"Of {len(rounds)} rounds, the encoder of epoch {best_epoch} {kept}, with a validation bag AUC of "
        f"{aucs[best_epoch]:.3f}; the first (epoch {first}) has {aucs[first]:.3f} and the last (epoch {last}) "
        f"{aucs[last]:.3f}."
    )


def cohort(facts: RunFacts) -> str:
    """What the cohort is."""
    if facts.cohort is None:
        return f"{facts.cohort_path} can no longer be read."
    truth = "with" if facts.cohort.info.has_instance_labels else "without"
    dim, size = facts.cohort.info.feature_dim, facts.cohort.tile_size
    held = f"tiles of {size} px" if dim is None else f"{dim} features per tile, made elsewhere"
    text = f"{facts.cohort_path}: {held}, {truth} instance ground truth."
    rate = (facts.results or {}).get("cohort", {}).get("witness_rate")
    if rate is not None:
        text += f" Witness rate, the share of positives in positive bags: {rate:.1%}."
    text += " No group (patient) is in two splits."
    marked = facts.run / CORRECTIONS
    if marked.is_file():
        marks = pd.read_csv(marked, dtype={"bag_id": str}, keep_default_na=False)
        positive, negative = int((marks["label"] == 1).sum()), int((marks["label"] == 0).sum())
        text += (
            f" A person marked {positive} tiles as positive and {negative} as negative in "
            f"{marks['bag_id'].nunique()} training bags; refinement trusted them."
        )
    return text


def training_words(metrics: Sequence[dict[str, Any]]) -> list[str]:
    """How loss and spread went, per stage."""
    sentences = []
    for stage in dict.fromkeys(entry["stage"] for entry in metrics):
        entries = [entry for entry in metrics if entry["stage"] == stage]
        losses, spreads = (
            {entry["epoch"]: entry[name] for entry in entries if name in entry} for name in ("loss", "spread")
        )
        if not losses:
            continue
        text = f"{STAGE_NAMES.get(stage, stage)}: the loss went {_course(losses)}"
        if spreads:
            text += f"; the spread of the embeddings, 0 for one point, {_course(spreads)}"
        sentences.append(f"{text}.")
    return sentences


def _course(values: Mapping[int, float]) -> str:
    """Where values by epoch began and ended; and how far they went beyond both, if they did."""
    epochs = list(values)
    ends = values[epochs[0]], values[epochs[-1]]
    text = "from {:.3f} to {:.3f}".format(*ends)
    for name, epoch in (
        ("lowest", min(epochs, key=values.__getitem__)),
        ("highest", max(epochs, key=values.__getitem__)),
    ):
        if values[epoch] not in ends:
            text += f", {name} {values[epoch]:.3f} in epoch {epoch}"
    return text


def health_checks(health: dict[str, Any], config: RefineConfig) -> list[Check]:
    """The numbers of the health report against their limits, with advice about the settings that this run uses."""
    fixed = config.threshold_rule == "fixed"
    fewer = "raise refine.threshold" if fixed else "lower refine.false_positive_rate"
    more = "lower refine.threshold" if fixed else "raise refine.false_positive_rate"
    final, positive_bags = health["final"], max(1, health["positive_bags"])
    last = (health["rounds"] or [{}])[-1]
    share, empty = final["positive_share"], final["empty_positive_bags"]
    few = share is None or share < limits.FEW_POSITIVES
    shared = final["median_auc"] if few and (final["median_auc"] or 0) > limits.MEDIAN_AUC_LIMIT else None
    rows = [
        ("Instances of negative bags scored positive", final["false_positive_share"], limits.FALSE_POSITIVE_LIMIT, 1,
         f"Each of them is a mistake, so this number is exact. If high: {fewer} or train the aggregator longer."),
        ("Instances of positive bags scored positive", share, limits.POSITIVE_LIMIT, 1,
         "Should be about the share you expect. Near 100%, the model may judge the bag as a whole, not the instance."),
        ("Instances of positive bags that are positive, estimated", health.get("witness_rate"), None, 1,
         ("From how many instances of positive validation bags score higher than those of negative bags do. Poor "
          "scores make it too small.")),
        ("AUC of how far a bag's top instance stands out", final["contrast_auc"], shared, -1,
         ("How well the distance from a bag's median to its top instance tells the bag's label. It rises as instances "
          "are told apart better. Below the AUC of the median instance alone, which is the limit here, scores follow "
          "stain, scanner or patient.")),
        ("Pseudo labels that flipped in the last round", last.get("churn"), limits.CHURN_LIMIT, 1,
         "If high, the iteration has not settled: train longer or lower the learning rate."),
        ("Rank correlation between aggregator seeds", final["seed_spearman"], limits.SPEARMAN_LIMIT, -1,
         "If low, chance decides which instances are positive: train the aggregator longer."),
        ("Agreement of pseudo labels between seeds (kappa)", final["seed_kappa"], limits.KAPPA_LIMIT, -1,
         "As above, at the threshold."),
        ("Positive bags without any instance above the threshold", empty / positive_bags, limits.EMPTY_BAG_LIMIT, 1,
         f"{empty} of {health['positive_bags']}. If many: {more}."),
    ]  # fmt: skip
    return [_check(*row) for row in rows]


def all_settings(config: RunConfig) -> list[Setting]:
    """Every setting; values as they are typed after `--set`."""
    here, default = _flat(config), _flat(RunConfig())
    return [Setting(key, _typed(here[key]), _typed(default[key]) if key in default else "not set") for key in here]


def changed_settings(config: RunConfig) -> list[Setting]:
    """The settings that differ from the defaults, which are the paper's."""
    return [setting for setting in all_settings(config) if setting.value != setting.default]


def command_again(run: Path, cohort: Path, config: RunConfig) -> tuple[str, str | None] | None:
    """A command that starts a run with these very settings, and the recipe in it, if any.

    Of all recipes it takes the one that leaves the fewest settings to give. None where no command gives these settings.
    """
    wanted = _flat(config)
    best: tuple[list[str], str | None] | None = None
    for recipe in (None, *recipe_names()):
        start = _flat(resolve_config(recipe))
        overrides = [f"{key}={_typed(value)}" for key, value in wanted.items() if start.get(key, ...) != value]
        if (best is None or len(overrides) < len(best[0])) and resolve_config(recipe, overrides) == config:
            best = overrides, recipe
    if best is None:
        return None
    words = ["its2clr", "fit", str(cohort), "--out", str(run)]
    words += ["--recipe", best[1]] if best[1] is not None else []
    for override in best[0]:
        words += ["--set", override]
    return shlex.join(words), best[1]


def _gain(results: dict[str, Any], start: Scored, refined: Scored) -> str:
    one, other = refined.found["bag_auc_interval"], start.found["bag_auc_interval"]
    overlap = one[0] <= other[1] and other[0] <= one[1]
    apart = "The two intervals overlap" if overlap else "The two intervals do not overlap"
    before = f"{start.name} reaches {_with_interval(start.found, 'bag_auc')}. {apart}"
    comparison = results.get("comparison")
    if not comparison:
        return f"{before}."
    difference = comparison["bag_auc_difference"]
    low, high = comparison["bag_auc_difference_interval"]
    word = "gain" if difference >= 0 else "loss"
    if low > 0 or high < 0:
        claim = f"so on bags like these the {word} is more than chance"
    else:
        claim = "which includes zero, so this test set cannot tell the two apart"
    joined = "yet" if overlap and (low > 0 or high < 0) else "and"
    return (
        f"{before}, {joined} compared bag by bag the {word} of the refinement is {difference:+.3f} (95% interval "
        f"{low:+.3f} to {high:+.3f}), {claim}."
    )


def _with_interval(found: dict[str, Any], metric: str) -> str:
    low, high = found[f"{metric}_interval"]
    if not has_spread((low, high)):
        return f"{found[metric]:.3f} (no interval: every resample of these few bags gives the same)"
    return f"{found[metric]:.3f} (95% interval {low:.3f} to {high:.3f})"


def _check(name: str, value: float | None, limit: float | None, worse: int, meaning: str) -> Check:
    as_share = name.startswith(("Instances", "Pseudo", "Positive bags"))
    shown = "{:.1%}" if as_share else "{:.2f}"
    if value is None or not np.isfinite(value):
        return Check(name, "not defined", "", False, meaning)
    if limit is None:
        return Check(name, shown.format(value), "", False, meaning)
    side = "above" if worse > 0 else "below"
    return Check(name, shown.format(value), f"{side} {shown.format(limit)}", (value - limit) * worse > 0, meaning)


def _typed(value: Any) -> str:
    """A value as it is typed after `--set`: plain text where YAML leaves it as it is, else JSON."""
    return value if isinstance(value, str) and _is_plain(value) else json.dumps(value)


def _is_plain(text: str) -> bool:
    try:
        return bool(yaml.safe_load(text) == text)
    except yaml.YAMLError:
        return False


def _flat(config: RunConfig) -> dict[str, Any]:
    return flatten(config.model_dump(mode="json"))

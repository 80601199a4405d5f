"""Make the model file of an evaluated run: its best encoder and aggregators, and what validation says about them."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from its2clr.aggregators.trained import TrainedAggregators
from its2clr.cohort.layout import read_info
from its2clr.encoders.weights import built_as, load_network, without_foreign_weights
from its2clr.errors import InputError
from its2clr.plugins import import_plugins
from its2clr.predict.calibration import fit_calibration
from its2clr.predict.model_file import (
    MODEL_FILE,
    AggregatorPart,
    Member,
    ModelDescription,
    TrainedModel,
    join_model,
    load_model,
    save_model,
)
from its2clr.predict.seen_bags import bag_hashes
from its2clr.predict.tiling import Tiling
from its2clr.run.decisions import read_thresholds
from its2clr.run.made_from import changed_models
from its2clr.run.names import aggregator_path, encoder_file, encoder_names
from its2clr.run.results_file import measured
from its2clr.run.saved import read_run_config
from its2clr.run.scores import Model, RunScores


def export_model(run: str | Path, out: str | Path | None = None, model: Model | None = None) -> Path:
    """Write the model file of an evaluated run.

    Args:
        run: Folder of the run.
        out: Where to write; None: `model.its2clr` in the run.
        model: Which encoder and aggregator; None: the refined encoder with the run's aggregator, or what there is.

    Returns:
        The file.

    Raises:
        InputError: The run is not evaluated, or has no such model.
    """
    return save_model(model_of_run(run, model), Path(run) / MODEL_FILE if out is None else out)


def open_model(path: str | Path) -> TrainedModel:
    """The model in a file, or of a folder: of a run, from its model file if that holds the run's best model, else anew.

    Raises:
        InputError: There is no model.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path}: there is no such run or model file")
    if not path.is_dir():
        return load_model(path)
    if read_run_config(path) is None and (path / MODEL_FILE).is_file():  # a cross-validation
        return load_model(path / MODEL_FILE)
    scores = RunScores(path)
    import_plugins(scores.config.plugins)
    if (path / MODEL_FILE).is_file():
        written = load_model(path / MODEL_FILE)
        same = Model(written.description.encoder_name, written.description.aggregator.name) == scores.best
        if same and written.description.cohort.get("made_from") == _made_from(scores, scores.best):
            return written
    return model_of_run(path)


def model_of_run(run: str | Path, model: Model | None = None) -> TrainedModel:
    """The model of an evaluated run, in memory; see `export_model`."""
    scores = RunScores(run)
    config = scores.config
    import_plugins(config.plugins)
    chosen = model or scores.best
    if chosen not in scores.models:
        raise InputError(f"{run}: no evaluated model {' + '.join(chosen)}")
    made_from = _made_from(scores, chosen)
    own = config.aggregator.name
    aggregators = TrainedAggregators.load(
        aggregator_path(scores.run, chosen.encoder, None if chosen.aggregator == own else chosen.aggregator)
    )
    encoder = load_network(encoder_file(scores.run, chosen.encoder)).encoder.eval()
    thresholds = read_thresholds(scores.run, config, scores.results, chosen)
    labels, probability = _validation(scores, chosen)
    info = read_info(scores.cohort_path)
    description = ModelDescription(
        method=encoder_names(config)[chosen.encoder],
        label=str(info.settings.get("label", "label")),
        encoder_name=chosen.encoder,
        encoder=without_foreign_weights(built_as(encoder, config)),
        aggregator=AggregatorPart(
            name=aggregators.name,
            options=dict(aggregators.options),
            feature_dim=aggregators.feature_dim,
            seeds=aggregators.seeds,
            validation_auc=tuple(aggregators.validation_auc.tolist()),
            best_epoch=tuple(aggregators.best_epoch.tolist()),
        ),
        plugins=tuple(Path(plugin).name if plugin.endswith(".py") else plugin for plugin in config.plugins),
        precision=config.engine.precision,
        tiling=Tiling.of_cohort(info),
        threshold=thresholds.bag,
        instance_threshold=thresholds.instance,
        calibration=fit_calibration(labels, probability).as_dict(),
        metrics=_plain(measured(scores.results, chosen)),
        cohort=_plain({key: value for key, value in scores.results["cohort"].items() if key != "path"})
        | ({} if made_from is None else {"made_from": made_from}),
        seen=bag_hashes(scores.made_from),
    )
    return join_model(description, Member(encoder, aggregators))


def _made_from(scores: RunScores, model: Model) -> dict[str, str] | None:
    """Identity of cohort and weights that the evaluation of a model was made from; None of an older version.

    Raises:
        InputError: The weights have changed since.
    """
    known, name = scores.results.get("made_from"), " ".join(model)
    if known is None:
        return None
    if name in changed_models(scores.run, scores.config, scores.results):
        raise InputError(
            f"{scores.run}: the weights of {name} are not those that were evaluated; restore them, or train a new run"
        )
    return {"cohort": known["cohort"], "model": known["models"][name]}


def _validation(scores: RunScores, model: Model) -> tuple[Any, Any]:
    """Labels and probabilities of the validation bags; no other bag is looked at."""
    bags = scores.bags
    chosen = bags[
        (bags["split"] == "val") & (bags["encoder"] == model.encoder) & (bags["aggregator"] == model.aggregator)
    ]
    if chosen.empty:
        raise InputError(
            f"{scores.run}: evaluated by an older version of its2clr, which did not predict validation bags; run "
            f"`its2clr evaluate {scores.run}` again"
        )
    return chosen["label"].to_numpy(dtype=np.int64), chosen["probability"].to_numpy(dtype=np.float64)


def _plain(value: Any) -> Any:
    """The same with null for numbers that JSON cannot hold (NaN, infinity)."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

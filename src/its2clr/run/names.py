"""The encoders of a run: what they are called in files and commands, and in words."""

from pathlib import Path
from urllib.parse import quote

from its2clr.config import FEATURES, RefineConfig, RunConfig
from its2clr.pretrain.titles import method_title
from its2clr.run.saved import read_run_config

START = "start"
"""The encoder before refinement: pretrained, given, or of a cohort of features the features themselves."""
REFINED = "refined"
END_TO_END = "end_to_end"
STAGE_OF = {START: "pretrain", REFINED: "refine", END_TO_END: "end_to_end"}
"""The stage that makes each encoder."""
ENCODERS = tuple(STAGE_OF)
_OTHER_CHECKPOINTS = {
    f"encoder-{REFINED}.safetensors": "Refined before",
    f"encoder-{END_TO_END}.safetensors": "End to end",
}
"""Encoders of a run that are not its start; that of a corrected run was refined already."""


def encoder_file(run: Path, encoder: str) -> Path:
    """Where a run keeps an encoder."""
    return run / "checkpoints" / f"encoder-{encoder}.safetensors"


def aggregator_path(run: Path, encoder: str, name: str | None = None) -> Path:
    """Where a run keeps an encoder's trained aggregators; `name` is of another aggregator than the run's own."""
    return run / "aggregators" / f"{encoder if name is None else f'{encoder}-{quote(name)}'}.safetensors"


def encoder_names(config: RunConfig) -> dict[str, str]:
    """The name of each encoder: before refinement, refined, trained end to end."""
    return {
        START: start_name(config),
        REFINED: refinement_name(config.refine),
        END_TO_END: "End to end",
    }


def start_name(config: RunConfig) -> str:
    """What the encoder before refinement is; one that was taken from another run is called as it is there."""
    start = config.pretrain.start
    if start is None:
        if config.encoder.name == FEATURES:
            return "Frozen features"
        if config.pretrain.epochs > 0:
            return method_title(config.pretrain.method)
        if config.encoder.weights is not None:
            return "Given weights"
        return "Pretrained weights" if config.encoder.pretrained else "Random"
    if Path(start).name in _OTHER_CHECKPOINTS:
        return _OTHER_CHECKPOINTS[Path(start).name]
    other = read_run_config(start if Path(start).is_dir() else Path(start).parents[1])
    return "Given start" if other is None else start_name(other[0])


def refinement_name(config: RefineConfig) -> str:
    """What the settings of a refinement amount to, in the paper's words."""
    if config.labels == "ground_truth":
        return "Ground-truth finetuning"
    if config.objective != "supervised_contrastive":
        name = "Cross-entropy" if config.objective == "cross_entropy" else config.objective
        return f"{name} finetuning" + ("" if config.iterative else " without iteration")
    without = [word for word, on in (("iteration", config.iterative), ("self-pacing", config.self_paced)) if not on]
    return f"ItS2CLR without {' and '.join(without)}" if without else "ItS2CLR"

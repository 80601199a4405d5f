"""What the models of a run are called, in the paper's words."""

from pathlib import Path

from its2clr.config import RefineConfig, RunConfig
from its2clr.encoders.encoder import FEATURES

METHOD_NAMES = {
    "simclr": "SimCLR",
    "moco": "MoCo",
    "byol": "BYOL",
    "dino": "DINO",
    "bag_labels": "Bag labels on tiles",
}
OTHER_CHECKPOINTS = {"encoder-its2clr.safetensors": "Refined before", "encoder-end_to_end.safetensors": "End to end"}
"""Encoders of a run that are not its start; that of a corrected run was refined already."""


def encoder_names(config: RunConfig) -> dict[str, str]:
    """The name of each encoder: before refinement, refined, trained end to end."""
    return {
        "simclr": start_name(config),
        "its2clr": refinement_name(config.refine),
        "end_to_end": "End to end",
    }


def start_name(config: RunConfig) -> str:
    """What the encoder before refinement is; one that was taken from another run is called as it is there."""
    start = config.pretrain.start
    if start is None:
        if config.encoder.name == FEATURES:
            return "Frozen features"
        if config.pretrain.epochs > 0:
            return METHOD_NAMES[config.pretrain.method]
        if config.encoder.weights is not None:
            return "Given weights"
        return "Pretrained weights" if config.encoder.pretrained else "Random"
    if Path(start).name in OTHER_CHECKPOINTS:
        return OTHER_CHECKPOINTS[Path(start).name]
    from its2clr.run.directory import read_run_config

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

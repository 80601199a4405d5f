"""What the models of a run are called, in the paper's words."""

from pathlib import Path

from its2clr.config import PretrainConfig, RefineConfig, RunConfig
from its2clr.encoders.encoder import FEATURES

REFINED_CHECKPOINT = "encoder-its2clr.safetensors"


def encoder_names(config: RunConfig) -> dict[str, str]:
    """The name of each encoder: before refinement, refined, trained end to end."""
    return {
        "simclr": start_name(config.pretrain, frozen=config.encoder.name == FEATURES),
        "its2clr": refinement_name(config.refine),
        "end_to_end": "End to end",
    }


def start_name(config: PretrainConfig, *, frozen: bool = False) -> str:
    """What the encoder before refinement is: that of a corrected run was refined already.

    Args:
        config: Where the start comes from.
        frozen: Whether it is the features of a cohort of features.
    """
    if config.start is not None and Path(config.start).name == REFINED_CHECKPOINT:
        return "Refined before"
    return "Frozen features" if frozen else "SimCLR"


def refinement_name(config: RefineConfig) -> str:
    """What the settings of a refinement amount to, in the paper's words."""
    if config.labels == "ground_truth":
        return "Ground-truth finetuning"
    if config.objective != "supervised_contrastive":
        name = "Cross-entropy" if config.objective == "cross_entropy" else config.objective
        return f"{name} finetuning" + ("" if config.iterative else " without iteration")
    without = [word for word, on in (("iteration", config.iterative), ("self-pacing", config.self_paced)) if not on]
    return f"ItS2CLR without {' and '.join(without)}" if without else "ItS2CLR"

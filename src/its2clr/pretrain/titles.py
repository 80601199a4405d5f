"""The pretraining methods of the package: module and title of each. Does not import torch, so reports start fast."""

BUILT_IN = {
    "simclr": ("its2clr.pretrain.simclr", "SimCLR"),
    "moco": ("its2clr.pretrain.moco", "MoCo"),
    "byol": ("its2clr.pretrain.byol", "BYOL"),
    "dino": ("its2clr.pretrain.dino", "DINO"),
    "bag_labels": ("its2clr.pretrain.bag_labels", "Bag labels on tiles"),
}


def method_title(name: str) -> str:
    """What a method is called in tables; a plugin's method keeps its own name."""
    return BUILT_IN[name][1] if name in BUILT_IN else name

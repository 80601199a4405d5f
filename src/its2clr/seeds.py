"""Random generators derived from names, so that a run can resume without saving any random state."""

import hashlib

import numpy as np
import torch


def derive_seed(*keys: int | str) -> int:
    """A 63-bit seed from the run's seed and a purpose, e.g. `derive_seed(0, "refine", epoch, rank)`."""
    digest = hashlib.sha256("/".join(str(key) for key in keys).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def torch_generator(device: torch.device, *keys: int | str) -> torch.Generator:
    """A torch generator on a device, seeded from names."""
    return torch.Generator(device=device).manual_seed(derive_seed(*keys))


def numpy_generator(*keys: int | str) -> np.random.Generator:
    """A numpy generator seeded from names."""
    return np.random.default_rng(derive_seed(*keys))

"""Losses: tensors in, a scalar out; one file each."""

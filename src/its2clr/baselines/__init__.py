"""Baselines that the paper compares with."""

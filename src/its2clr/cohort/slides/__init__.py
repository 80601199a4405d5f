"""Whole-slide images become bags of tiles."""

"""A run: its folder, its stages, its features, its scores, and the sealed evaluation on test bags."""

"""A run: its folder, its stages, its features, what its models say, and the sealed evaluation on test bags."""

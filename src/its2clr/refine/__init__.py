"""Algorithm 1 of the paper, one idea per file."""

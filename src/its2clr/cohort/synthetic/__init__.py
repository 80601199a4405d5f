"""The embedded cohort: procedural slides with instance ground truth."""

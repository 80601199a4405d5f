"""Numbers a lab can defend, from arrays: bag and instance metrics, intervals over bags, health without ground truth."""

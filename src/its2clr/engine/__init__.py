"""What every stage runs on: devices, run directory, checkpoints, resume, progress, seeds."""

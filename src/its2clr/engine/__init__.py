"""What every stage runs on: devices, CUDA graphs, checkpoints, resume, progress, memory."""

"""The policy trainer: a driver that runs the algorithm without tensors, and workers that hold the model."""

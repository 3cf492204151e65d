"""The policy trainer: a driver that holds the algorithm and no tensor, and workers that hold the model."""

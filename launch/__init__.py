"""Commands that start, watch and steer a run."""

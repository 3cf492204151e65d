"""Commands that start, watch and control a run."""

"""The recorder: writes human-readable samples to `samples/` in the run directory."""

"""The recorder: writes samples that people can read to `samples/` of the run directory."""

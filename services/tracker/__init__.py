"""The tracker: reports a run to an experiment tracker, using the files in the run directory."""

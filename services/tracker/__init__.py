"""The tracker: reports a run to an experiment tracker, from the files of the run directory."""

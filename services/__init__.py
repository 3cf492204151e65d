"""The services of a run, one package each."""

"""The services of a run, one package for each."""

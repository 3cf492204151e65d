"""The supervisor: starts the processes of a run, restarts those that die, ends them in order."""

"""The supervisor: starts the processes of a run, restarts those that die, and ends them in order."""

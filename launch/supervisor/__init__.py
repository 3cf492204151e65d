"""The supervisor: starts the processes of a run, restarts those that die, and stops them in order."""

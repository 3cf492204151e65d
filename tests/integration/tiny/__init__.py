"""Real services that do no work and need no torch, and a launcher that starts them instead of the usual ones."""

"""What the commands share: finding a run, printing, signals, directories."""

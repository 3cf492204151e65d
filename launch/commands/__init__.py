"""Code that the commands share: printing, signals, run directories, and the agent of a host."""

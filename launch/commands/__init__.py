"""Code that the commands share: printing, run directories, access files, and evaluations."""

"""What people read about a run: status, logs, stories, samples, reports, the terminal."""

"""Views of a run for people: status, logs, stories, samples, reports and the terminal interface."""

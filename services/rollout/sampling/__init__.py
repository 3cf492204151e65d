"""From a leased task to its sampled tokens."""

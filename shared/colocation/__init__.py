"""Sharing devices between processes: which parts may be there together, turns, and memory that leaves and returns."""

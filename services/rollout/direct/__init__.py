"""Sampling that a server asks for directly: without tasks, leases and rewards."""

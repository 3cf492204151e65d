"""Processes started ahead of need, which replace dead ones quickly."""

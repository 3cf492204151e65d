"""Checks and fetches before a run starts."""

"""The base of the errors about inputs of a run. It imports nothing, so that every process can afford it."""

from __future__ import annotations


class Unusable(Exception):
    """An input of the run (its topology, a file, a model, a user's function) cannot be used."""

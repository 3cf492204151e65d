"""Loads the language model from a folder and scores tokens. It needs torch, so lightweight services do not import
it."""

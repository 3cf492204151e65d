"""Loads the language model from a folder and scores tokens. It needs torch, so light services do not import it."""

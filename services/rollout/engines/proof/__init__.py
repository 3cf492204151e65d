"""Proof that an engine holds the weights it was given."""

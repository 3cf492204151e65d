"""Tensors from one process to a few others over a collective library. Must never decide what is sent, or when."""

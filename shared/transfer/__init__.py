"""Transfers tensors from one process to a few others over a collective library. Callers decide what to send."""

"""Sampling for a server's clients: which engine gets a request, and what becomes of it."""

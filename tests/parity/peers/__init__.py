"""Recorders of what other libraries compute. Run in those libraries' own environments, never by a test."""

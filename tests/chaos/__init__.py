"""Disturbs real runs and checks that no acknowledged data is lost. `make chaos MINUTES=10` does this for ten
minutes."""

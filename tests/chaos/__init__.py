"""Disturbs real runs and checks that nothing acknowledged is lost. `make chaos MINUTES=10` runs it for that long."""

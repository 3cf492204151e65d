"""The reference actor scores tokens with a frozen model."""

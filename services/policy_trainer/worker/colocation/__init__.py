"""Residency of a rank's training state on devices that other services may share."""

"""Warnings about a run: detectors of known failures, the episodes that they find, and the file that keeps them."""

"""Transfers weights to engines by collectives, and uses the drill and digests to prove that they arrived."""

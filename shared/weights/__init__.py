"""Transfers weights to engines by collectives, and proves that they arrived by means of the drill and of digests."""

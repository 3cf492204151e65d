"""Transfers weights to engines and proves that they arrived: collectives, the drill's arithmetic, and digests."""

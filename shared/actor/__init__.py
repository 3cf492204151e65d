"""The actor runtime: one process (in tests, one thread) with one mailbox and one life cycle."""

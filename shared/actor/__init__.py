"""The actor runtime: one process (or, in tests, one thread), one mailbox, one life-cycle."""

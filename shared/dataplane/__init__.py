"""The same-host data plane: shards from the process that made them to the one that needs them, through shared memory."""

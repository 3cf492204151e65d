"""The same-host data plane: shards go from the process that made them to their readers, through shared memory."""

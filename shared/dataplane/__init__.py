"""The same-host data plane: shards go from the process that produced them to their readers, through shared memory."""

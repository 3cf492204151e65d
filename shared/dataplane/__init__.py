"""The same-host data plane: shards go from the process that made them to those that need them, by shared memory."""

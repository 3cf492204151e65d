"""The scheduler service: tasks, leases, steps, versions and the collection of shards."""

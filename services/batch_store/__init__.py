"""batch_store."""

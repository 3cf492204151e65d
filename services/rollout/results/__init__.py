"""From sampled tokens to shards and results."""

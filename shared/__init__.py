"""What every service stands on: rpc, actor runtime, topology, telemetry, batches and the data-plane client."""

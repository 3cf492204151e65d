"""The foundation of all services: rpc, actor runtime, topology, telemetry, batches and the data-plane client."""

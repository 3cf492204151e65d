"""The monitor: collects telemetry and publishes it to subscribers."""

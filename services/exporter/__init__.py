"""The exporter: passes the monitor's values to Prometheus, and spans to OpenTelemetry and to a file for Perfetto."""

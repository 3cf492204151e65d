"""Contains one module per experiment tracker, each with an `Exporter`."""

"""The language model: loading it from a folder and scoring tokens. It needs torch: light services do not import it."""

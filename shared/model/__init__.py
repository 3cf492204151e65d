"""The language model: loading it from a folder and scoring tokens. Needs torch; light services do not import it."""

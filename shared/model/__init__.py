"""The language model: loaded from a folder, scored token by token. Needs torch; the light services never import it."""

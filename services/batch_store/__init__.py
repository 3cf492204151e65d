"""The batch store: grants room for puts, records which file holds which task, and frees files that are cleared."""

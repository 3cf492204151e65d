"""The batch store: who may put how much, which file holds which task, and when its bytes are free again."""

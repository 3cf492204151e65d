"""The rollout service samples tasks with an inference engine."""

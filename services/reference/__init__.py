"""The actors of the reference, the teacher and the reward model score with a frozen model."""

"""Rewards: from the topology's terms to one number a sample. User code runs in processes of its own, never here."""

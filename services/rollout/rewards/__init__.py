"""Rewards: turns the topology's terms into one number per sample. User code runs in separate processes."""

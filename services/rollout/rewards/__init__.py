"""Rewards: from the topology's terms to one number a sample. User code runs here, and never on the service's loop."""

"""Turns the topology's reward terms into one number per sample. User code runs in separate processes."""

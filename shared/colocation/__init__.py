"""Shares devices between processes: the parts allowed on them together, turns, and moving memory off and back."""

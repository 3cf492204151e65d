"""Shares devices between processes: the parts allowed there together, turns, and moving memory off and back."""

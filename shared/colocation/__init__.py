"""Shares devices among processes: the parts allowed there together, turns, and moving memory off the devices and
back."""

"""Shares devices among processes: defines which parts may be there together, manages turns, and moves memory off the
devices and back."""

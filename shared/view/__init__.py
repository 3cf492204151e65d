"""The model of a live run, for display in a terminal or a browser. It performs no I/O and does not read the clock.

It takes rows from the monitor's stream, rows of `metrics.jsonl` and log lines, and returns plain frozen values. Its
size is bounded, however long a run lasts.
"""

from shared.view.run_view import RunView

__all__ = ["RunView"]

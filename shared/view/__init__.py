"""The model of a live run, for whoever shows it: a terminal, a browser. It reads nothing and keeps no clock.

Rows of the monitor's stream, rows of `metrics.jsonl` and lines of logs go in; plain frozen values come out. Its size is
bounded, however long a run lasts.
"""

from shared.view.run_view import RunView

__all__ = ["RunView"]

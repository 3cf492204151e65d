"""Feeds all trackers of a run from the files in the run directory: rows in commit order, samples and warnings."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

from services.tracker.exporter import End
from services.tracker.outlet import Outlet
from shared.rundir import RunDir
from shared.topology import Topology

POLL_S = 1.0
END_POLL_S = 0.05


class Feeder:
    """Fills the queues of the trackers `names`. `run` may run on any thread."""

    def __init__(self, run: RunDir, topology: Topology, names: Sequence[str]) -> None:
        self.outlets = [Outlet(run, topology, name) for name in names]
        self._end: End | None = None
        self._ending = threading.Event()

    def run(self) -> None:
        """Fill the queues until every outlet is done: because the run has ended, or the tracker was given up."""
        for outlet in self.outlets:
            outlet.start()
        while not self.done:
            for outlet in self.outlets:
                outlet.fill(self._end)
                outlet.check()
            if self._end is None:
                self._ending.wait(POLL_S)
            else:
                self.wait(END_POLL_S)

    def end(self, end: End) -> None:
        """Make `run` deliver what remains, tell the trackers how the run ended, and return."""
        self._end = end
        self._ending.set()

    @property
    def done(self) -> bool:
        return all(outlet.done.is_set() for outlet in self.outlets)

    def wait(self, limit_s: float) -> None:
        """Wait until a outlet that is not done is done, or for `limit_s`."""
        for outlet in self.outlets:
            if not outlet.done.is_set():
                outlet.done.wait(limit_s)
                return


def end_of(run: RunDir) -> End:
    """Return how the run ended, as recorded by its supervisor when the run began to shut down."""
    try:
        outcome = json.loads(run.outcome.read_bytes())
        return End(str(outcome["outcome"]), str(outcome["cause"]))
    except (OSError, ValueError, KeyError, TypeError):
        return End("killed")

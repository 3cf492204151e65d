"""Feeds all trackers of a run from the files in the run directory: rows in commit order, samples and warnings."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

from services.tracker.delivery import Delivery
from services.tracker.exporter import End
from shared.rundir import RunDir
from shared.topology import Topology

POLL_S = 1.0
END_POLL_S = 0.05


class Feeder:
    """Fills the queues of the trackers `names`. `run` may run on any thread."""

    def __init__(self, run: RunDir, topology: Topology, names: Sequence[str]) -> None:
        self.deliveries = [Delivery(run, topology, name) for name in names]
        self._end: End | None = None
        self._ending = threading.Event()

    def run(self) -> None:
        """Fill the queues until every delivery is done: because the run has ended, or the tracker was given up."""
        for delivery in self.deliveries:
            delivery.start()
        while not self.done:
            for delivery in self.deliveries:
                delivery.fill(self._end)
                delivery.check()
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
        return all(delivery.done.is_set() for delivery in self.deliveries)

    def wait(self, limit_s: float) -> None:
        """Wait until a delivery that is not done is done, or for `limit_s`."""
        for delivery in self.deliveries:
            if not delivery.done.is_set():
                delivery.done.wait(limit_s)
                return


def end_of(run: RunDir) -> End:
    """Return how the run ended, as recorded by its supervisor when the run began to shut down."""
    try:
        found = json.loads(run.outcome.read_bytes())
        return End(str(found["outcome"]), str(found["cause"]))
    except (OSError, ValueError, KeyError, TypeError):
        return End("killed")

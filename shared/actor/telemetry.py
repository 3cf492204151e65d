"""Sends telemetry to the monitor: may drop, says how many, and nothing that training depends on travels here."""

from __future__ import annotations

import time

from proto.errors import WireError
from proto.messages import Telemetry
from shared.rpc.client import Client

SPAN = "span"


class TelemetrySender:
    """One per service. `emit` never blocks and never raises for a missing monitor."""

    def __init__(self, service: str, instance: int, incarnation: int) -> None:
        self._service = service
        self._instance = instance
        self._incarnation = incarnation
        self._sequence = 0
        self._client: Client | None = None
        self.dropped = 0

    def connect(self, client: Client) -> None:
        """Send to this monitor from now on."""
        self._client = client

    def span(self, what: str, seconds: float) -> None:
        """Say that `what` has just ended after so many seconds: a bar of the run's time line. Loop thread only."""
        self.emit(SPAN, {"what": what, "seconds": seconds})

    def emit(self, topic: str, values: dict[str, float | str]) -> None:
        """Say that `values` of `topic` changed. Loop thread only."""
        self._sequence += 1
        message = Telemetry(
            service=self._service,
            instance=self._instance,
            incarnation=self._incarnation,
            sequence=self._sequence,
            dropped=self.dropped,
            at=time.time(),
            topic=topic,
            values=values,
        )
        try:
            sent = self._client is not None and self._client.tell(message)
        except WireError:  # larger than a message may be, or no text: a user's names may make it so
            sent = False
        if not sent:
            self.dropped += 1

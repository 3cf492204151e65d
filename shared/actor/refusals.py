"""Tells the monitor what peers of one process did that they must not: strangers, garbage, orders above their role.

Counts only; it must never decide who is let in.
"""

from __future__ import annotations

import asyncio

from shared.actor.telemetry import TelemetrySender
from shared.rpc.mailbox import Mailbox
from shared.security.zap import Gate

TOPIC = "security"


async def report_refusals(mailbox: Mailbox, gate: Gate | None, telemetry: TelemetrySender, every_s: float) -> None:
    """Emit the counts whenever they changed, looking every `every_s` seconds, until cancelled."""
    said: dict[str, int] = {}
    while True:
        await asyncio.sleep(every_s)
        counts = mailbox.counts()
        if gate is not None:
            counts["strangers"] = sum(gate.refused.values())
        if counts != said and any(counts.values()):
            telemetry.emit(TOPIC, {name: float(count) for name, count in counts.items()})
        said = counts

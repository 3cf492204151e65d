"""Reports the offences of a process's peers to the monitor: unknown peers, unreadable messages, requests above their
role. It only reports counts; the mailbox and the gate decide on admission.
"""

from __future__ import annotations

import asyncio

from shared.actor.telemetry import TelemetrySender
from shared.rpc.mailbox import Mailbox
from shared.security.zap import Gate

TOPIC = "security"


async def report_refusals(mailbox: Mailbox, gate: Gate | None, telemetry: TelemetrySender, every_s: float) -> None:
    """Check the counts every `every_s` seconds and emit them if they changed, until cancelled."""
    emitted: dict[str, int] = {}
    while True:
        await asyncio.sleep(every_s)
        counts = mailbox.counts()
        if gate is not None:
            counts["strangers"] = sum(gate.refused.values())
        if counts != emitted and any(counts.values()):
            telemetry.emit(TOPIC, {name: float(count) for name, count in counts.items()})
        emitted = counts

"""Sends telemetry to the monitor. Training does not depend on it: messages may be dropped, and drops are counted.

Two kinds of values concern every process: the resources that it uses (`ResourceMeter`), and the offences committed by
its peers (`report_refusals`): unknown peers, unreadable messages, and requests that a peer's role does not allow. The
latter only reports counts; the mailbox and the gate decide on admission.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable, Mapping
from itertools import islice
from types import MappingProxyType

import psutil
import xxhash

from proto.errors import WireError
from proto.messages import Telemetry
from shared.rpc.client import Client
from shared.rpc.mailbox import Mailbox
from shared.security.zap import Gate

SPAN, PART, SECURITY = "span", "span/part", "security"
FLUSH_EVERY_S = 0.2
"""Seconds between the times at which messages are sent. These times are multiples of this value on the host's monotonic
clock, so that the monitor is woken only once for all services: a wake-up takes more CPU time than a message."""
PENDING = 512
"""Once this many messages are waiting, all of them are sent without waiting for the next such time."""
MAX_TASKS = 64
"""Maximum number of traced tasks that one span names."""
_ALL_HASHES = 1 << 64
_NOTHING: Mapping[str, float | str] = MappingProxyType({})


class TelemetrySender:
    """The telemetry of one service. `emit` does not block, and does not raise if the monitor is missing."""

    def __init__(self, service: str, instance: int, incarnation: int) -> None:
        self._service = service
        self._instance = instance
        self._incarnation = incarnation
        self._sequence = 0
        self._client: Client | None = None
        self._pending: list[tuple[int, float, str, dict[str, float | str]]] = []
        """Reports that have not been sent yet: sequence number, time, topic and values."""
        self._timer: asyncio.TimerHandle | None = None
        self.dropped = 0
        self.traced_share: float | None = None
        """Fraction of the tasks that are named in spans, from 0 to 1 (`monitor.traces`), or None if the run has no
        traces."""

    def connect(self, client: Client) -> None:
        """From now on, send to the monitor through `client`."""
        self._client = client

    def span(self, what: str, seconds: float, about: Mapping[str, float | str] = _NOTHING, *, of: str = "") -> None:
        """Report that `what` has just ended after `seconds` seconds, for the run's timeline. Call it on the loop's
        thread.

        `of` is the process (`rollout/0`) or service that a wait was for; it is empty for work. `about` says what the
        span belongs to: `tasks` (see `traced`), `lease`, `step`.
        """
        self.emit(SPAN, {"what": what, "seconds": seconds, **({"of": of} if of else {}), **about})

    def part(self, what: str, seconds: float, about: Mapping[str, float | str]) -> None:
        """Report a part of the life of traced tasks or of a step. The part may contain spans and waits.

        The report is for traces only: nothing is sent if the run has no traces, or if none of the `tasks` is traced.
        """
        if self.traced_share is not None and about.get("tasks") != "":
            self.emit(PART, {"what": what, "seconds": seconds, **about})

    def traced(self, task_ids: Iterable[str]) -> str:
        """Return the ids of the traced tasks, at most `MAX_TASKS`, separated by spaces, or an empty string.

        Every process traces the same tasks.
        """
        if not self.traced_share:
            return ""
        bound = self.traced_share * _ALL_HASHES
        chosen = (task_id for task_id in task_ids if xxhash.xxh3_64_intdigest(task_id.encode()) < bound)
        return " ".join(islice(chosen, MAX_TASKS))

    def emit(self, topic: str, values: dict[str, float | str]) -> None:
        """Report new `values` of `topic`, within `FLUSH_EVERY_S` seconds. Call it on the loop's thread."""
        self._sequence += 1
        if self._client is None:
            self.dropped += 1
            return
        self._pending.append((self._sequence, time.time(), topic, values))
        if len(self._pending) == PENDING:
            self.flush()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(FLUSH_EVERY_S - loop.time() % FLUSH_EVERY_S, self.flush)

    def flush(self) -> None:
        """Send what has been reported. Call it before the client is closed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        pending, self._pending = self._pending, []
        for sequence, at, topic, values in pending:
            message = Telemetry(
                service=self._service,
                instance=self._instance,
                incarnation=self._incarnation,
                sequence=sequence,
                dropped=self.dropped,
                at=at,
                topic=topic,
                values=values,
            )
            try:
                sent = self._client is not None and self._client.tell(message)
            except WireError:  # too large, or not valid text: names chosen by a user can cause either
                sent = False
            if not sent:
                self.dropped += 1


async def report_refusals(mailbox: Mailbox, gate: Gate | None, telemetry: TelemetrySender, every_s: float) -> None:
    """Check the counts every `every_s` seconds and emit them if they changed, until cancelled."""
    emitted: dict[str, int] = {}
    while True:
        await asyncio.sleep(every_s)
        counts = mailbox.counts()
        if gate is not None:
            counts["strangers"] = sum(gate.refused.values())
        if counts != emitted and any(counts.values()):
            telemetry.emit(SECURITY, {name: float(count) for name, count in counts.items()})
        emitted = counts


class ResourceMeter:
    """Measures this process, without its child processes."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._before = (time.monotonic(), self._cpu_s())

    def read(self) -> dict[str, float | str]:
        """Return `rss_bytes`, `cpu_share` since the previous call (1.0 is one core), and `gpu_bytes` unless it is 0."""
        now, used_s = time.monotonic(), self._cpu_s()
        before, used_before_s = self._before
        self._before = (now, used_s)
        values: dict[str, float | str] = {"rss_bytes": float(self._process.memory_info().rss)}
        if now > before:
            values["cpu_share"] = (used_s - used_before_s) / (now - before)
        reserved = _gpu_bytes()
        if reserved:
            values["gpu_bytes"] = float(reserved)
        return values

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


def _gpu_bytes() -> int:
    """Return the number of bytes of GPU memory that PyTorch has reserved in this process. Does not import torch."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    initialized = getattr(cuda, "is_initialized", None)
    if cuda is None or initialized is None or not initialized():
        return 0
    return sum(int(cuda.memory_reserved(index)) for index in range(cuda.device_count()))

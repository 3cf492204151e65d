"""The exporter: reads the monitor as any subscriber does, so that neither scrapers nor collectors delay the monitor.

For Prometheus, the exporter asks the monitor for its last values, at most once a second. For traces, it follows the
topics that report spans. Spans that the exporter misses are absent from the traces; this has no other effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

import zmq

from proto import codec
from proto.errors import WireError
from proto.messages import ErrorCode, GetSnapshot, Snapshot, TopicRow, Update
from services.exporter.perfetto import TraceFile
from services.exporter.spans import TOPICS, Interval, Tracer, intervals
from shared.actor.service import Service
from shared.guest_server import GuestServer
from shared.rpc.errors import BadInput, RpcError
from shared.rpc.transport import Pump, open_socket
from shared.rundir import RunDir
from shared.topology import load_resolved
from shared.topology.monitor import Prometheus, TokenError, Traces, read_token, split_address

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from services.exporter.otlp import OtlpSender

MONITOR_STREAM = "monitor-pub"
FOLDER = "traces"
FLUSH_S = 1.0
FRESH_S = 1.0
"""For this many seconds, further scrapes reuse the monitor's answer."""
SNAPSHOT_S = 2.0
LAST_S = 1.0
"""Maximum time, in seconds, to send the last spans when the run ends."""
MOST_SCRAPERS = 16
QUIET_S = 30
WAITING = 20_000
"""Maximum number of intervals between two flushes. Further intervals are dropped and counted."""


class ExporterService(Service):
    """The exporter of a run."""

    NAME: ClassVar[str] = "exporter"

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        monitor = load_resolved(run.topology).monitor
        self._prometheus, self._traces = monitor.prometheus, monitor.traces
        self._server = self._page(self._prometheus) if self._prometheus is not None else None
        self._otlp = _sender(self._traces.otlp, run.name) if self._traces is not None and self._traces.otlp else None
        self._file = self._opened(self._traces) if self._traces is not None and self._traces.file else None
        """The trace file, or None if none is wanted or it can no longer be written."""
        self._snapshot: tuple[float, list[TopicRow]] = (-1.0, [])
        """Loop time of the monitor's last answer, and the rows of that answer."""
        self._asking = asyncio.Lock()
        self._up = False
        self._tracer = Tracer(run.name)
        self._waiting: list[Interval] = []
        self._spans = 0
        self._dropped = 0

    # ---- life

    async def start(self) -> None:
        if self._server is not None:
            self.closing.push_async_callback(self._server.stop)
            await self._open_page(self._server)
        self.closing.callback(self._close_file)
        if self._otlp is not None:
            self._otlp.start()
            self.closing.push_async_callback(asyncio.to_thread, self._otlp.close, LAST_S)
        if self._traces is not None:
            self.closing.callback(self._flush)
            self.closing.callback(self._follow().close)

    async def serve(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            self._flush()

    def _page(self, settings: Prometheus) -> GuestServer:
        """Return the server of /metrics. Raises BadInput if the library or the token cannot be used."""
        try:
            from services.exporter.scrape import Scrape
        except ImportError as error:
            raise _missing("monitor.prometheus", error) from None
        try:
            token = read_token(settings.token) if settings.token is not None else ""
        except TokenError as error:
            raise BadInput(f"monitor.prometheus.token: {error}") from error
        return GuestServer(
            Scrape(self._metrics, token),
            QUIET_S,
            listen=split_address(settings.listen),
            most_connections=MOST_SCRAPERS,
        )

    async def _open_page(self, server: GuestServer) -> None:
        """Serve /metrics. Raises a one-line RpcError if the address cannot be used."""
        try:
            await server.start()
        except OSError as error:
            listen = self._prometheus.listen if self._prometheus is not None else ""
            text = f"monitor.prometheus.listen: {listen} cannot be used ({error.strerror}); choose another"
            raise RpcError(ErrorCode.BUSY, text) from None
        self.log.info("serves Prometheus", address=f"http://{server.address}/metrics")

    def _opened(self, settings: Traces) -> TraceFile | None:
        try:
            return TraceFile(self.run.path / FOLDER, settings.file_limit)
        except OSError as error:
            self._lose_file(error)
            return None

    def _follow(self) -> Pump:
        """Receive the topics of the monitor that report spans."""
        socket = open_socket(self.context, zmq.SUB)
        for topic in TOPICS:
            socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        socket.connect(self.run.endpoint(MONITOR_STREAM, 0))
        return Pump(socket, self._on_update)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()

    # ---- traces

    def _on_update(self, frames: list[bytes]) -> None:
        if frames[0].decode("utf-8", "replace") not in TOPICS:
            return
        try:
            body = codec.decode(frames[1:]).body
        except WireError:
            return
        if isinstance(body, Update):
            received = list(intervals(body.row))
            room = WAITING - len(self._waiting)
            self._waiting += received[:room]
            self._dropped += max(0, len(received) - room)

    def _flush(self) -> None:
        """Pass the received intervals on as spans."""
        waiting, self._waiting = self._waiting, []
        placed = [(interval, list(self._tracer.spans(interval))) for interval in waiting]
        spans = [span for _, mine in placed for span in mine]
        self._spans += len(spans)
        if self._otlp is not None:
            self._otlp.put(spans)
        if self._file is not None:
            try:
                self._file.write(placed)
            except OSError as error:
                self._lose_file(error)
        if placed:
            self._emit_counts()

    def _lose_file(self, error: OSError) -> None:
        self.log.warning("traces/ is no longer written; the run goes on", cause=error.strerror or str(error))
        self._file = None

    def _emit_counts(self) -> None:
        values: dict[str, float | str] = {"spans": float(self._spans), "dropped": float(self._dropped)}
        if self._otlp is not None:
            values |= {"otlp_sent": float(self._otlp.sent), "otlp_dropped": float(self._otlp.dropped)}
            values["otlp_trouble"] = self._otlp.trouble
        self.telemetry.emit("traces", values)

    # ---- Prometheus

    async def _metrics(self) -> Iterable[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        from services.exporter.families import PREFIX, collect

        rows = await self._rows()
        collected = collect(rows)
        up = GaugeMetricFamily(f"{PREFIX}_monitor_up", "Whether the monitor answers, 1 or 0.", value=float(self._up))
        left = CounterMetricFamily(
            f"{PREFIX}_exporter_left_out_series", "Series beyond the limit of their metric.", value=collected.left_out
        )
        return [up, left, *collected]

    async def _rows(self) -> list[TopicRow]:
        """Return the monitor's last values, at most `FRESH_S` old, or an empty list if the monitor does not answer."""
        async with self._asking:
            if self.loop.time() - self._snapshot[0] > FRESH_S:
                try:
                    answer = await self.client("monitor").call(GetSnapshot(), Snapshot, deadline_s=SNAPSHOT_S)
                    rows, self._up = answer.rows, True
                except RpcError:
                    rows, self._up = [], False
                self._snapshot = (self.loop.time(), rows)
        return self._snapshot[1]


def _sender(url: str, run: str) -> OtlpSender:
    try:
        from services.exporter.otlp import OtlpSender, headers_of_environment
    except ImportError as error:
        raise _missing("monitor.traces.otlp", error) from None
    return OtlpSender(url, run, headers_of_environment())


def _missing(key: str, error: ImportError) -> BadInput:
    return BadInput(f"{key}: needs the package {error.name}, which is not installed; run make setup-observability")

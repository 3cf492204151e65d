"""Sends spans to an OpenTelemetry collector: OTLP over HTTP with protobuf bodies, from a bounded queue.

A collector that is slow or unreachable, or that refuses spans, does not delay anything else. Spans that the collector
does not accept are dropped and counted.
"""

from __future__ import annotations

import http.client
import os
import random
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import unquote, urlsplit

import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from services.exporter.spans import STEP, TraceSpan, span_id

PATH = "/v1/traces"
QUEUED_SPANS = 16_384
"""Maximum number of spans waiting for the collector. The oldest spans are dropped first."""
BATCH_SPANS = 512
CALL_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
RETRIED = frozenset({429, 502, 503, 504})
"""HTTP status codes after which a request is repeated (OTLP specification, "Failures")."""
NAME = "rlbus"


class CollectorRefused(Exception):
    """The collector is not accepting these spans at present, or will never accept them (`forever`)."""

    def __init__(self, text: str, *, forever: bool) -> None:
        super().__init__(text)
        self.forever = forever


class OtlpSender:
    """The queue of one collector, and the connection to it."""

    def __init__(self, url: str, run: str, headers: Mapping[str, str]) -> None:
        """If `url` has no path, `/v1/traces` is used. `run` is the name of the run."""
        parts = urlsplit(url)
        self.url = url
        self._host, self._port = parts.hostname or "", parts.port
        self._secure = parts.scheme == "https"
        self._path = parts.path if parts.path.strip("/") else PATH
        self._run = run
        self._headers = {**headers, "content-type": "application/x-protobuf", "user-agent": NAME}
        self._queue: deque[TraceSpan] = deque()
        self._changed = threading.Condition()
        """Guards the queue and `_ending`."""
        self._ending = False
        self._connection: http.client.HTTPConnection | None = None
        self._log = structlog.get_logger("exporter")
        # A daemon thread, so that the process can exit without waiting for a collector that does not answer.
        self._thread = threading.Thread(target=self._work, name="otlp", daemon=True)
        self.sent = 0
        """Number of spans that the collector has accepted."""
        self.dropped = 0
        """Number of spans that were dropped."""
        self.trouble = ""
        """The reason why the collector is not accepting spans at present, or an empty string."""

    def start(self) -> None:
        self._thread.start()

    def put(self, spans: Iterable[TraceSpan]) -> None:
        """Queue spans. This does not block."""
        with self._changed:
            self._queue.extend(spans)
            while len(self._queue) > QUEUED_SPANS:
                self._queue.popleft()
                self.dropped += 1
            self._changed.notify()

    def close(self, limit_s: float) -> None:
        """Send the queued spans in one attempt, which takes at most `limit_s` seconds."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join(limit_s)

    # ---- on the thread

    def _work(self) -> None:
        pause_s = FIRST_PAUSE_S
        while batch := self._next_batch():
            try:
                self._post(encoded(batch, self._run))
            except (CollectorRefused, ValueError) as error:  # ValueError: a header that HTTP does not allow
                self._take_back(batch, error)
                with self._changed:
                    if self._ending or self._changed.wait_for(lambda: self._ending, pause_s * random.uniform(0.5, 1)):
                        return
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                pause_s = FIRST_PAUSE_S
                self.sent += len(batch)
                if self.trouble:
                    self._log.info("traces arrive again", collector=self.url, dropped=self.dropped)
                    self.trouble = ""

    def _next_batch(self) -> list[TraceSpan]:
        """Wait for spans and return them. Return an empty list once the sender is closed and no spans are left."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._ending)
            return [self._queue.popleft() for _ in range(min(len(self._queue), BATCH_SPANS))]

    def _take_back(self, batch: list[TraceSpan], error: Exception) -> None:
        with self._changed:
            if not isinstance(error, CollectorRefused) or error.forever:
                self.dropped += len(batch)
            else:
                self._queue.extendleft(reversed(batch))
        if self.trouble != str(error):
            self.trouble = str(error)
            self._log.warning(
                "traces are not arriving; spans are being dropped, but the run goes on", cause=self.trouble
            )

    def _post(self, body: bytes) -> None:
        """Post one request on the open connection, or on a new one if the collector has closed it."""
        fresh = self._connection is None
        try:
            connection = self._connection = self._connection or self._connected()
            connection.request("POST", self._path, body, self._headers)
            answer = connection.getresponse()
            answer.read(64 << 10)
        except (OSError, http.client.HTTPException) as error:
            self._disconnect()
            if not fresh:
                self._post(body)
                return
            why = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
            raise CollectorRefused(f"collector {self.url}: {why}", forever=False) from None
        if answer.will_close:
            self._disconnect()
        if answer.status >= 300:
            text = f"collector {self.url}: answered {answer.status} {answer.reason} to POST {self._path}"
            raise CollectorRefused(text, forever=answer.status not in RETRIED)

    def _connected(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=CALL_S)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def headers_of_environment() -> dict[str, str]:
    """Return the headers in OTEL_EXPORTER_OTLP_HEADERS (`key=value,key=value`, percent-encoded)."""
    pairs = (pair.partition("=") for pair in os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(","))
    return {unquote(key.strip()): unquote(value.strip()) for key, equals, value in pairs if equals and key.strip()}


def encoded(spans: Sequence[TraceSpan], run: str) -> bytes:
    """Return the request body. Each process is a separate resource, as service instances are in OpenTelemetry."""
    request = ExportTraceServiceRequest()
    by_process: dict[str, list[TraceSpan]] = {}
    for span in spans:
        by_process.setdefault(span.interval.process, []).append(span)
    for process, mine in by_process.items():
        service, _, instance = process.partition("/")
        resource = request.resource_spans.add()
        resource.resource.attributes.extend(
            [
                _attribute("service.namespace", NAME),
                _attribute("service.name", service),
                _attribute("service.instance.id", f"{run}/{service}/{instance}"),
                _attribute("rlbus.run", run),
            ]
        )
        scope = resource.scope_spans.add()
        scope.scope.name = NAME
        scope.spans.extend(_span(span) for span in mine)
    body: bytes = request.SerializeToString()
    return body


def _span(span: TraceSpan) -> Span:
    interval = span.interval
    attributes = [_attribute("rlbus.subject", span.subject)]
    attributes += [_attribute(f"rlbus.{key}", value) for key, value in interval.facts.items()]
    for key, number in (("rlbus.step", interval.step), ("rlbus.lease", interval.lease)):
        if number is not None:
            attributes.append(_attribute(key, number))
    return Span(
        trace_id=span.trace,
        span_id=span.id,
        parent_span_id=span.parent,
        name=span.name,
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=round(interval.begin * 1e6) * 1000,
        end_time_unix_nano=round(interval.end * 1e6) * 1000,
        attributes=attributes,
        links=[Span.Link(trace_id=span.link, span_id=span_id(span.link, STEP))] if span.link else [],
    )


def _attribute(key: str, value: float | str) -> KeyValue:
    if isinstance(value, str):
        return KeyValue(key=key, value=AnyValue(string_value=value))
    if isinstance(value, int):
        return KeyValue(key=key, value=AnyValue(int_value=value))
    return KeyValue(key=key, value=AnyValue(double_value=value))

"""Tests that spans reach an OpenTelemetry collector over HTTP.

A collector that is slow or unreachable, or that refuses spans, does not delay any process.
"""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from services.exporter import otlp
from services.exporter.otlp import OtlpSender, headers_of_environment
from services.exporter.spans import Interval, Tracer, TraceSpan, span_id, trace_id


class Collector:
    """A collector that listens, decodes and keeps spans."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.connections = 0
        self.answers: list[int] = []
        """Status codes of the next answers. All later answers have status 200."""
        self.gate = threading.Event()
        self.gate.set()
        self.changed = threading.Condition()

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def wait(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.spans) >= count, 30)


@contextmanager
def collector(port: int = 0) -> Iterator[tuple[Collector, int]]:
    kept = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            kept.connections += 1

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            kept.gate.wait(30)
            status = kept.answers.pop(0) if kept.answers else 200
            if status == 200:
                with kept.changed:
                    kept.requests.append(ExportTraceServiceRequest.FromString(body))
                    kept.changed.notify_all()
            kept.paths.append(self.path)
            kept.headers.append({key.lower(): value for key, value in self.headers.items()})
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield kept, server.server_address[1]
    finally:
        kept.gate.set()
        server.shutdown()
        server.server_close()


def some(count: int, first: int = 0) -> list[TraceSpan]:
    tracer = Tracer("run")
    work = [Interval("rollout/0", "generate", n, n + 0.5, (f"train/0/{n}",)) for n in range(first, first + count)]
    return [span for each in work for span in tracer.spans(each)]


def sender(port: int, path: str = "", **headers: str) -> OtlpSender:
    made = OtlpSender(f"http://127.0.0.1:{port}{path}", "run", headers)
    made.start()
    return made


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(otlp, "LONGEST_PAUSE_S", 0.05)


def test_a_span_arrives_with_its_ids_times_attributes_and_link() -> None:
    train = Interval(
        "policy-trainer/0", "train", 10.0, 12.5, ("train/0/1",), step=4, facts={"reward": 0.5, "text": "é"}
    )
    with collector() as (kept, port):
        mine = sender(port, authorization="secret")
        mine.put(Tracer("run").spans(train))
        kept.wait(1)
        mine.close(10)
    assert kept.paths == ["/v1/traces"]
    assert kept.headers[0]["authorization"] == "secret"
    assert kept.headers[0]["content-type"] == "application/x-protobuf"
    [resource] = kept.requests[0].resource_spans
    facts = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert facts["service.name"] == "policy-trainer"
    assert facts["service.instance.id"] == "run/policy-trainer/0"
    [span] = kept.spans
    trace = trace_id("run", "train/0/1")
    assert (span.name, span.trace_id, span.parent_span_id) == ("train", trace, span_id(trace, "task"))
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (10_000_000_000, 12_500_000_000)
    values = {each.key: each.value for each in span.attributes}
    assert values["rlbus.step"].int_value == 4
    assert values["rlbus.reward"].double_value == 0.5
    assert values["rlbus.text"].string_value == "é"
    step = trace_id("run", "step/4")
    assert [(link.trace_id, link.span_id) for link in span.links] == [(step, span_id(step, "step"))]


def test_many_spans_are_sent_in_batches_over_one_connection() -> None:
    with collector() as (kept, port):
        mine = sender(port, "/custom/path")
        mine.put(some(2000))
        kept.wait(2000)
        mine.close(10)
        assert kept.connections == 1
        assert len(kept.requests) >= 2000 // otlp.BATCH_SPANS
        assert set(kept.paths) == {"/custom/path"}
        assert len({span.span_id for span in kept.spans}) == 2000
    assert mine.sent == 2000
    assert mine.dropped == 0


def test_spans_are_kept_while_the_collector_is_unreachable_and_sent_later() -> None:
    with collector() as (_, port):
        pass
    mine = sender(port)
    mine.put(some(3))
    until = time.monotonic() + 30
    while not mine.trouble and time.monotonic() < until:
        time.sleep(0.01)
    assert mine.trouble == f"collector http://127.0.0.1:{port}: Connection refused"
    with collector(port) as (kept, _):
        kept.wait(3)
        mine.close(10)
    assert (mine.sent, mine.dropped, mine.trouble) == (3, 0, "")


def test_a_batch_is_sent_again_after_an_overload_but_not_after_a_refusal() -> None:
    with collector() as (kept, port):
        kept.answers = [503, 429, 200, 404]
        mine = sender(port)
        mine.put(some(2))
        kept.wait(2)
        mine.put(some(5, first=10))
        until = time.monotonic() + 30
        while not mine.dropped and time.monotonic() < until:
            time.sleep(0.01)
        assert mine.trouble.endswith("answered 404 Not Found to POST /v1/traces")
        mine.put(some(1, first=20))
        kept.wait(3)
        mine.close(10)
    assert (mine.sent, mine.dropped) == (3, 5)


def test_a_collector_that_hangs_delays_neither_the_callers_nor_the_shutdown() -> None:
    with collector() as (kept, port):
        kept.gate.clear()
        mine = sender(port)
        began = time.monotonic()
        for first in range(0, 40_000, 1000):
            mine.put(some(1000, first))
        assert mine.dropped >= 40_000 - otlp.QUEUED_SPANS - otlp.BATCH_SPANS
        ended = time.monotonic()
        mine.close(0.2)
        assert time.monotonic() - ended < 5
        assert ended - began < 30


def test_an_invalid_http_header_is_reported_and_does_not_stop_the_sender() -> None:
    with collector() as (_, port):
        made = sender(port, authorization="Bearer\nx")
        made.put(some(1))
        until = time.monotonic() + 10
        while not made.trouble and time.monotonic() < until:
            time.sleep(0.01)
        assert "Invalid header" in made.trouble
        assert made.dropped == 1
        made.close(5)


def test_headers_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc, x-scope = me ,bad")
    assert headers_of_environment() == {"authorization": "Bearer abc", "x-scope": "me"}

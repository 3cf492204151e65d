"""The sections for Prometheus (`monitor.prometheus`) and traces (`monitor.traces`), and checks that they are usable."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from shared.topology.fields import LocalPath, Section, Size
from shared.topology.monitor_web import TokenError, check_address, check_reach, read_token
from shared.topology.problem import Found

_PROMETHEUS, _TRACES = ("services", "monitor", "prometheus"), ("services", "monitor", "traces")
_SCHEMES = ("http://", "https://")


def _check_url(url: str) -> str:
    rest = next((url.removeprefix(scheme) for scheme in _SCHEMES if url.startswith(scheme)), "")
    host = rest.partition("/")[0]
    if not host or "@" in host or any(each.isspace() for each in url):
        raise ValueError(f"{url!r} is not the address of a collector; write one such as http://127.0.0.1:4318")
    return url


class Prometheus(Section):
    listen: Annotated[str, AfterValidator(check_address)] = Field(
        default="127.0.0.1:9464", description="address and TCP port of /metrics"
    )
    token: LocalPath | None = Field(
        default=None,
        description="file with the bearer token that scrapers need; required unless only this machine can reach "
        "the address",
    )


class Traces(Section):
    otlp: Annotated[str, AfterValidator(_check_url)] | None = Field(
        default=None,
        description="address of an OpenTelemetry collector (OTLP over HTTP), such as http://127.0.0.1:4318; headers "
        "are taken from OTEL_EXPORTER_OTLP_HEADERS; default: none",
    )
    file: bool = Field(default=True, description="write traces/trace.json, which Perfetto loads, in the run directory")
    file_limit: Size = Field(
        default=64 * 1024**2,
        ge=64 * 1024,
        description="maximum bytes of traces/, such as 64MiB; must be at least 64KiB; the oldest spans are removed "
        "first",
    )
    share: float = Field(
        default=0.05, ge=0, le=1, description="fraction of the tasks to trace, 0 to 1; every step is traced"
    )


def check(prometheus: Prometheus | None, traces: Traces | None) -> Found:
    """Yield a problem if others can reach the address without a token, or if no trace would be kept."""
    if prometheus is not None:
        yield from check_reach(_PROMETHEUS, prometheus.listen, prometheus.token)
    if traces is not None and traces.otlp is None and not traces.file:
        yield _TRACES, "no span would be kept: file is false and otlp is not set; set one, or remove the section"


def token_problems(prometheus: Prometheus) -> Found:
    """Yield the problem with the token file, if any. Only the exporter's host has this file."""
    if prometheus.token is not None:
        try:
            read_token(prometheus.token)
        except TokenError as error:
            yield (*_PROMETHEUS, "token"), str(error)

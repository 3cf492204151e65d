"""Tests the resource usage that a process reports."""

from __future__ import annotations

import time

import psutil

from shared.actor.telemetry import ResourceMeter


def burn(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_the_cpu_share_covers_the_time_since_the_previous_reading() -> None:
    meter = ResourceMeter()
    begun = time.monotonic()
    burn(0.3)
    busy = meter.read()
    share = 0.3 / (time.monotonic() - begun)
    assert 0.8 * share <= float(busy["cpu_share"]) <= 1.5
    time.sleep(0.3)  # This is the idle time that is measured.
    assert float(meter.read()["cpu_share"]) < float(busy["cpu_share"]) / 2


def test_memory_of_the_process_is_reported_and_gpu_memory_only_if_the_gpu_is_used() -> None:
    values = ResourceMeter().read()
    assert abs(float(values["rss_bytes"]) - psutil.Process().memory_info().rss) < 64 << 20
    assert "gpu_bytes" not in values

"""Measures the resources that a process uses: memory, CPU time and GPU memory."""

from __future__ import annotations

import sys
import time

import psutil


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

"""What every process of an emulated machine does when it starts: it waits for modules to be imported, and changes them.
No product code knows of this."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

ALLOWED = "EMULATED_GPU_DETERMINISTIC"
"""Variable that allows GPUs with `run.deterministic`: the kernels are the CPU's, so a run has its bits again."""


class After:
    """Finds a module with a loader that then runs an action on it."""

    def __init__(self, name: str, action: Callable[[Any], None]) -> None:
        self._name = name
        self._action = action
        self._searching = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name or self._searching:
            return None
        self._searching = True  # also for a library that only asks whether the module exists, and imports it later
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            self._action(module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


def replace_kernels(torch: Any) -> None:
    from tests.emulated_gpu import collectives, kernels, special

    kernels.install(special.KERNELS)
    collectives.install()


def leave_out_device_memory(psutil: Any) -> None:
    """Let the memory of a process be without that of devices, which lies in the host's memory here."""
    whole = psutil.Process.memory_info

    def memory_info(self: Any) -> Any:
        info = whole(self)
        return info._replace(rss=info.rss - device_memory(self.pid))

    psutil.Process.memory_info = memory_info


def device_memory(pid: int) -> int:
    """Return the bytes of device memory that are in the resident memory of a process."""
    total, counts = 0, False
    try:
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            field, _, rest = line.partition(":")
            if " " in field:  # the first line of a mapping
                counts = "memfd:emulated-gpu" in line
            elif counts and field == "Rss":
                total += int(rest.split()[0]) * 1024
    except OSError:
        pass  # psutil has just read the process, which may be gone by now
    return total


def allow_deterministic_gpus(checks: Any) -> None:
    faults = checks._deterministic

    def other_faults(topology: Any) -> Iterator[tuple[tuple[str, ...], str]]:
        return (fault for fault in faults(topology) if fault[0][-1] not in ("gpus", "backend"))

    checks._deterministic = other_faults


sys.meta_path.insert(0, After("torch", replace_kernels))
sys.meta_path.insert(0, After("psutil", leave_out_device_memory))
if os.environ.get(ALLOWED):
    sys.meta_path.insert(0, After("shared.topology.checks", allow_deterministic_gpus))

"""A pytest plugin: the last worker of pytest-xdist has low priority and runs only tests that do not wait for anything.

Tests of real processes leave a fifth of the processor time idle. The last worker uses that time for computations, in
`BACKGROUND`; on a busy processor, it gets a tenth of the time that another worker gets, so its tests may take ten times
as long before they count as hanging. It exits when no such tests are left, so that no other test has to share the
processors with two others.
"""

from __future__ import annotations

import os

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

BACKGROUND = ("tests/golden/", "tests/property/", "tests/sim/", "tests/unit/")
NICENESS = 10
PATIENCE = 10
"""Factor by which the last worker extends the time limits of its tests."""


class _Scheduling(LoadFileScheduling):
    """Hands out whole files, in the order of collection. The last worker gets files in `BACKGROUND` only."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        if node.gateway.id == _last_worker(self.numnodes):
            file = next((file for file in self.workqueue if file.startswith(BACKGROUND)), None)
            if file is None:
                node.shutdown()
                return
            self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)


def _last_worker(count: int) -> str:
    return f"gw{count - 1}"


def _is_last() -> bool:
    """Return whether this process is the last worker."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return os.environ.get("PYTEST_XDIST_WORKER") == _last_worker(count)


def pytest_configure() -> None:
    if _is_last():
        os.nice(NICENESS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not _is_last():
        return
    usual = float(config.getini("timeout"))
    for item in items:
        own = item.get_closest_marker("timeout")
        limit = float([*own.args, *own.kwargs.values()][0]) if own is not None else usual
        item.add_marker(pytest.mark.timeout(PATIENCE * limit), append=False)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _Scheduling:
    return _Scheduling(config, log)

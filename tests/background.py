"""A pytest plugin: the last worker of pytest-xdist has low priority and runs only tests that do not wait for anything.

Tests of real processes leave a fifth of the processor time idle. The last worker uses that time for computations
without time limits, in `BACKGROUND`; on a busy processor, it gets a tenth of the time that another worker gets. It
exits when no such tests are left, so that no other test has to share the processors with two others.
"""

from __future__ import annotations

import os

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

BACKGROUND = ("tests/golden/", "tests/property/", "tests/sim/", "tests/unit/")
NICENESS = 10


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


def pytest_configure() -> None:
    worker, count = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    if worker == _last_worker(int(count)):
        os.nice(NICENESS)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _Scheduling:
    return _Scheduling(config, log)

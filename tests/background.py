"""A pytest plugin: the last workers of pytest-xdist have low priority and run only tests that do not wait for anything.

Tests of real processes leave a quarter of the processor time idle. The last workers use that time for computations, in
`BACKGROUND`; on a busy processor, each gets a tenth of the time that another worker gets, so its tests may take ten
times as long before they count as hanging. They exit when no such tests are left, so that no other test has to share
the processors with three others.
"""

from __future__ import annotations

import os

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

BACKGROUND = ("tests/golden/", "tests/property/", "tests/sim/", "tests/unit/")
WORKERS = 2
"""The number of workers in the background, which `make test` adds to JOBS."""
NICENESS = 10
PATIENCE = 10
"""Factor by which workers in the background extend the time limits of their tests."""


class _Scheduling(LoadFileScheduling):
    """Hands out whole files, in the order of collection. Workers in the background get files in `BACKGROUND`
    only."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        if _is_in_background(node.gateway.id, self.numnodes):
            file = next((file for file in self.workqueue if file.startswith(BACKGROUND)), None)
            if file is None:
                node.shutdown()
                return
            self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)


def _is_in_background(worker: str, count: int) -> bool:
    return int(worker.removeprefix("gw")) >= count - WORKERS


def _am_in_background() -> bool:
    """Return whether this process is a worker in the background."""
    worker, count = os.environ.get("PYTEST_XDIST_WORKER"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    return worker is not None and _is_in_background(worker, count)


def pytest_configure() -> None:
    if _am_in_background():
        os.nice(NICENESS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not _am_in_background():
        return
    usual = float(config.getini("timeout"))
    for item in items:
        own = item.get_closest_marker("timeout")
        limit = float([*own.args, *own.kwargs.values()][0]) if own is not None else usual
        item.add_marker(pytest.mark.timeout(PATIENCE * limit), append=False)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _Scheduling:
    return _Scheduling(config, log)

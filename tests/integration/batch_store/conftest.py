from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.store_process import StoreProcess, ending, make_run


@pytest.fixture
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[StoreProcess]:
    """A running store with the memory limit that the test's module sets as MEMORY."""
    with ending(StoreProcess(make_run(tmp_path, memory=request.module.MEMORY))) as process:
        process.start()
        yield process

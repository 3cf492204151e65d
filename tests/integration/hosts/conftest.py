from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.hosts.streamed import MEMORY
from tests.integration.store_process import ending, make_run
from tests.integration.stream_line import TcpStoreProcess


@pytest.fixture
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TcpStoreProcess]:
    """A store that listens on TCP. A test module may set another memory limit as its MEMORY."""
    with ending(TcpStoreProcess(make_run(tmp_path, memory=getattr(request.module, "MEMORY", MEMORY)))) as process:
        yield process

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.batch_store.stream_server import StreamServer
from services.batch_store.stream_source import StreamSource
from tests.unit.shared.stream_rig import serving, source_of


@pytest.fixture
def source(tmp_path: Path) -> StreamSource:
    return source_of(tmp_path)


@pytest.fixture(params=["sealed", "plain"])
def server(request: pytest.FixtureRequest) -> Iterator[StreamServer]:
    with serving(plain=request.param == "plain") as made:
        yield made

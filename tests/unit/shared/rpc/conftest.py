from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.shared.rpc.rpc_actors import short_directory


@pytest.fixture
def ipc() -> Iterator[str]:
    """The address of an endpoint in a directory of its own, short enough for an ipc path."""
    with short_directory() as folder:
        yield f"ipc://{folder}/echo-0"

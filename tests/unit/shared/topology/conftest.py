from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.shared.topology.small_topology import make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that the tests' topologies name."""
    return make(tmp_path)

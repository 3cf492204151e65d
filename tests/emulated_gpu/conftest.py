"""These tests run on an emulated machine only (`make test-emulated-gpu`); elsewhere, pytest does not collect them."""

from __future__ import annotations

import os

import pytest

MACHINE = "EMULATED_GPU_RUN" in os.environ
collect_ignore_glob = [] if MACHINE else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("LONG"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="needs LONG=1"))

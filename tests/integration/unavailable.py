"""What a test does where its machine lacks something: it is skipped, but never in CI, where nothing may be left out."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def unavailable(why: str) -> NoReturn:
    """Skip the test; in CI it fails. `why` names what is missing."""
    if os.environ.get("CI"):
        pytest.fail(f"not to be left out in CI: {why}", pytrace=False)
    pytest.skip(why)

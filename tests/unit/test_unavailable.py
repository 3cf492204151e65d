"""What a machine cannot do is left out of the tests with the reason, and fails them in CI."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration import netns, two_hosts
from tests.integration.store_process import small_mount

OUTCOMES = {"1": pytest.fail.Exception, "": pytest.skip.Exception}


@pytest.mark.parametrize("ci", OUTCOMES)
@pytest.mark.parametrize("made", [netns.two_hosts, two_hosts.two_hosts, contextmanager(small_mount)])
def test_what_cannot_be_made_is_skipped_and_fails_in_ci(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made: Callable[..., AbstractContextManager[Any]], ci: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # no ip, no mount
    monkeypatch.setenv("CI", ci)
    arguments = () if "two_hosts" in made.__name__ else (tmp_path / "mount", 1 << 20)
    with pytest.raises(OUTCOMES[ci], match=r"\b(ip|mount)\b"), made(*arguments):
        raise AssertionError("it was made")

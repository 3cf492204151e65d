from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.rollout.reward_rig import MODULE


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory. The directory contains the module `my_rewards` and is not on Python's path."""
    (tmp_path / "my_rewards.py").write_text(MODULE.partition("class Broken")[0])
    (tmp_path / "my_broken.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path

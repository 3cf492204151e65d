"""Unmodified recipes of the cookbook that sample and train finish although each process that their work passes through
is killed, and what they save has the same bits as without the kills."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration.tinker.served_recipes import Running, serving_recipes
from tests.tinker_recipes import PYTHON, prepare

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON.exists(), reason="run make setup-tinker"),
]

KILLED = ("rollout", "policy-trainer-worker", "policy-trainer", "batch-store", "scheduler")
"""The service that is killed while step i + 1 is made."""
NAMES = ("rl_loop", "math_rl")


def test_recipes_that_sample_end_with_the_same_bits_after_kills(tmp_path: Path) -> None:
    prepare(tmp_path / "data", rows=24)
    with serving_recipes(tmp_path / "undisturbed", tmp_path / "data", "run.deterministic=true", limit_s=500) as one:
        undisturbed = {name: trained(one, name, ()) for name in NAMES}
    with serving_recipes(tmp_path / "disturbed", tmp_path / "data", "run.deterministic=true", limit_s=700) as one:
        disturbed = {name: trained(one, name, KILLED) for name in NAMES}
    assert len(undisturbed["rl_loop"]) >= 2
    assert disturbed == undisturbed


def trained(one: Running, name: str, killed: tuple[str, ...]) -> dict[str, bytes]:
    """Run a recipe, with a kill after each of its first steps. Return the files of its last checkpoint."""

    def kill(step: int) -> None:
        if step < len(killed):
            pid = one.cluster.wait_for("the process is READY", lambda: one.cluster.pid(killed[step]))
            os.kill(pid, signal.SIGKILL)

    before = set(one.cluster.path.glob("models/*"))
    rows = one.recipe(name, watch=kill)
    assert sum("progress/batch" in row for row in rows) >= 6
    (folder,) = set(one.cluster.path.glob("models/*")) - before
    return {file.name: file.read_bytes() for file in (folder / "weights" / "final").glob("*.safetensors")}

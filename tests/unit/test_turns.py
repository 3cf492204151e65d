"""Who may take turns on shared devices at all; the turns themselves are in tests/property/test_device_turns.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

from shared.actor.service import Service
from shared.devices import Parts
from shared.rundir import RunDir
from shared.turns import take_turns


class Sharer(Service):
    NAME = "rollout"
    HEARTBEATS = False

    async def start(self) -> None:
        take_turns(self, _nothing)


async def _nothing(parts: Parts) -> Parts:
    return parts


def test_a_process_that_nobody_could_kill_ends_before_it_takes_a_turn(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", shm_root=tmp_path / "shm")
    try:
        by_hand = Sharer(run, 1)
        assert asyncio.run(by_hand.run_until_stopped()) == 1
        assert "only a launcher may start it" in by_hand.cause
        assert f"launch.ctl --run {run.path} restart rollout/1" in by_hand.cause
    finally:
        run.remove_volatile()

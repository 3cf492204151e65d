"""Tests a scheduler process that has lost the end of its journal while the store and the workers from before the loss
are still alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from proto.messages import Complete, ErrorCode, LeaseGrant, Registered
from services.scheduler.journal_files import rewinds
from services.scheduler.recovery import TAIL_LOST
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from tests.integration.journal_cut import cut, reaches_its_mark
from tests.integration.policy_trainer.test_rows_discarded import Driving, journal_rows, lines, store
from tests.integration.policy_trainer.test_rows_discarded import run as run_of_no_evaluations
from tests.integration.scheduler.test_scheduler_service import Scheduler, World

run = run_of_no_evaluations
CUTS = 4
STEPS = 7


@pytest.fixture
def evaluation() -> str:
    return "{}"


@pytest.fixture
def scheduler(run: RunDir) -> Iterator[Scheduler]:
    process = Scheduler(run)
    yield process
    with contextlib.suppress(AssertionError):
        process.kill()


class Puts:
    """Puts that the store sealed.

    The store refuses different bytes under the same fence, and late puts of cleared tasks.
    """

    def __init__(self, world: World) -> None:
        self._result = world.result
        self._fences: dict[str, int] = {}

    def result(self, grant: LeaseGrant, stage: str, incarnation: int) -> Complete:
        for task in grant.batch.tasks:
            assert task.fence > self._fences.get(task.task_id, 0), f"{task.task_id} is sampled twice under {task.fence}"
            self._fences[task.task_id] = task.fence
        return self._result(grant, stage, incarnation)


async def drive(driving: Driving, world: World) -> None:
    """Train like a driver that is restarted whenever the scheduler no longer accepts its calls."""
    while True:
        try:
            await driving.drive(world)
        except RpcError as error:
            if error.code not in (ErrorCode.CONFLICT, ErrorCode.DEADLINE):
                raise


async def until(world: World, driving: Driving, commits: int) -> None:
    async with asyncio.timeout(60):
        while driving.commits < commits:
            done, _ = await asyncio.wait(world.tasks, timeout=0.002, return_when="FIRST_COMPLETED")
            for task in done:
                task.result()


def test_a_run_continues_from_its_checkpoint_when_the_end_of_its_journal_is_lost(
    run: RunDir, scheduler: Scheduler
) -> None:
    """Setting CUT_SEED to the printed number repeats the cuts of a failed run, with the same times and sizes."""
    seed = int(os.environ.get("CUT_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"CUT_SEED={seed}")
    chance, driving = random.Random(seed), Driving()

    async def scene() -> int:
        """Play the whole run and return the number of cuts that lost a commit."""
        world, cuts = World(run), 0
        registration = store("same")
        world.result = Puts(world).result  # type: ignore[method-assign]
        scheduler.start()
        try:
            client, _ = world.client()
            await client.call(registration, Registered, deadline_s=20)
            world.tasks += [asyncio.create_task(world.work("rollout", instance)) for instance in (0, 1)]
            world.tasks.append(asyncio.create_task(drive(driving, world)))
            while cuts < CUTS:
                await until(world, driving, driving.commits + STEPS)
                await asyncio.sleep(chance.uniform(0, 0.05))  # The kill occurs at a random point in the next steps.
                scheduler.kill()
                cuts += cut(run.journal, chance) and not reaches_its_mark(run.journal)
                scheduler.start()
                # Workers do the same after a heartbeat that is refused.
                await client.call(registration, Registered, deadline_s=20)
            await until(world, driving, driving.commits + STEPS)
        finally:
            await world.close()
        return cuts

    assert asyncio.run(scene()) == CUTS
    assert scheduler.stop() == 0
    written = lines(run.metrics)
    assert written == journal_rows(run)
    assert [row["step"] for row in written] == list(range(1, len(written) + 1))
    kept = {row["loss/policy"] for row in written}
    lost = [row["loss/policy"] for row in lines(Path(run.path / "metrics.discarded.jsonl"))]
    assert not kept & {*lost}
    assert len(lost) == len(set(lost))
    assert TAIL_LOST in {cause for _, _, cause in rewinds(run.journal)}
    log = run.log_file("scheduler", 0).read_text()
    assert log.count("the end of the journal is lost") == CUTS

"""Tests that ranks return to a snapshot in shared memory after a kill, all of them to the same step with the same bits,
and that damage is detected.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from proto.messages import ErrorCode, HeldSnapshot
from proto.tensors import Array
from services.policy_trainer.dispatch import WorkerDispatch, WorkersLost
from services.policy_trainer.worker.snapshots import Snapshots
from shared import topology as topologies
from shared.ranks.layout import Layout
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from shared.topology import snapshot_bytes
from tests.integration.policy_trainer.test_trainer_group import RECOVERY_S, assert_same_training, play, weights
from tests.integration.policy_trainer.test_trainer_worker import Bench, run
from tests.integration.policy_trainer.trainer_group import WorkerGroup, driver_of

__all__ = ["run"]
LINEAGE = 3


async def train(bench: Bench, workers: WorkerDispatch, step: int) -> None:
    workers.begin_step(1, snapshot_lineage=LINEAGE)
    await bench.train(workers, step)


async def held_by_all(workers: WorkerDispatch) -> list[int]:
    """Take the ranks over and return the steps of the snapshots that all of them hold."""
    held = (await workers.take_over()).snapshots
    assert {each.lineage for each in held} <= {LINEAGE}
    return sorted(each.step for each in held)


async def load(workers: WorkerDispatch, step: int, lineage: int = LINEAGE) -> None:
    """Load the state of `step` as soon as the group has formed again."""
    give_up = time.monotonic() + RECOVERY_S
    while True:
        try:
            await workers.take_over()
            await workers.load_checkpoint(step, snapshot_lineage=lineage)
            return
        except WorkersLost:
            assert time.monotonic() < give_up


def file_of(run: RunDir, layout: Layout, rank: int, step: int) -> Path:
    """Return the file in which a dead rank sealed its snapshot of `step`."""
    for file in (run.shm / "trainer" / "policy").glob(f"rank-{rank}-*"):
        alone = run.path / "alone"
        alone.mkdir(exist_ok=True)
        (alone / file.name).write_bytes(file.read_bytes())
        found = Snapshots(alone, layout.place(rank)).held()
        (alone / file.name).unlink()
        if found == [HeldSnapshot(lineage=LINEAGE, step=step)]:
            return file
    raise AssertionError(f"rank {rank} holds no snapshot of step {step}")


def flip_a_byte(file: Path) -> None:
    with file.open("r+b") as data:
        data.seek(file.stat().st_size // 2)
        (byte,) = data.read(1)
        data.seek(-1, 1)
        data.write(bytes([byte ^ 1]))


def play_losses(run: RunDir, layout: Layout, *options: str, exact: bool) -> None:
    """Train three steps and kill rank 1 twice. The first time, damage its newest snapshot; the second time, delete its
    newest snapshot and damage the other one."""

    async def scenario(bench: Bench, group: WorkerGroup) -> None:
        workers = await driver_of(bench, layout, 5)
        await workers.init_model()
        found: dict[int, dict[str, Array]] = {}
        fences = iter(range(1, 99))

        async def present(step: int) -> dict[str, Array]:
            return {name: each.copy() for name, each in (await weights(bench, workers, step, next(fences))).items()}

        def same(one: dict[str, Array], two: dict[str, Array]) -> bool:
            return one.keys() == two.keys() and all(one[name].tobytes() == two[name].tobytes() for name in one)

        for step in (1, 2, 3):
            await train(bench, workers, step)
            found[step] = await present(step)
            if step == 1:
                await workers.save_checkpoint(1)
        sizes = [file.stat().st_size for file in (run.shm / "trainer" / "policy").iterdir()]
        assert len(sizes) == 2 * layout.world_size
        assert sum(sizes) <= snapshot_bytes(topologies.load(run.topology))
        group.kill(1)
        flip_a_byte(file_of(run, layout, 1, step=3))
        assert await held_by_all(workers) == [2, 3]
        with pytest.raises(RpcError, match="is not what was written") as damaged:
            await load(workers, 3)
        assert damaged.value.code == ErrorCode.CONFLICT
        await load(workers, 2)  # Both ranks hold an intact snapshot of this step.
        assert same(await present(2), found[2])
        assert await held_by_all(workers) == [2]  # No rank holds a later step.
        await train(bench, workers, 3)
        again = await present(3)
        if exact:
            assert same(again, found[3])
        else:
            assert_same_training(again, found[3])

        group.kill(1)
        file_of(run, layout, 1, step=3).unlink()
        flip_a_byte(file_of(run, layout, 1, step=2))
        assert await held_by_all(workers) == [2]
        with pytest.raises(RpcError, match="is not what was written"):
            await load(workers, 2)
        await load(workers, 1, lineage=-1)
        assert same(await present(1), found[1])
        assert await held_by_all(workers) == []

    play(scenario, run, layout.world_size, *options)


@pytest.mark.timeout(3 * RECOVERY_S)
def test_ranks_return_to_the_newest_step_that_all_of_them_hold_intact(run: RunDir) -> None:
    play_losses(run, Layout(2), exact=True)


@pytest.mark.long
@pytest.mark.timeout(4 * RECOVERY_S)
def test_megatron_ranks_return_to_the_newest_step_that_all_of_them_hold_intact(run: RunDir) -> None:
    play_losses(run, Layout(2, tp=2), "backend: megatron", "parallel: {tp: 2}", exact=False)

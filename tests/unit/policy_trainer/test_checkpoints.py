"""Tests which checkpoints the driver keeps, with one and with two trained models."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import pytest

from services.policy_trainer import service
from services.policy_trainer.checkpoints import Checkpoints
from services.policy_trainer.dispatch import WorkerDispatch
from services.policy_trainer.publisher import Publisher
from services.policy_trainer.resume import ResumePoint
from services.policy_trainer.scheduler_calls import SchedulerCalls
from services.policy_trainer.service import PolicyTrainerService
from shared import checkpoint_files
from shared.checkpoint_files import STATE
from shared.rundir import RunDir, checkpoint_steps
from shared.topology import load
from tests.unit.shared.topology.small_topology import edited, make


def save(folder: Path, step: int, *, at_stop: bool = False) -> None:
    """Write what these tests need of a checkpoint."""
    (folder / f"step-{step}").mkdir(parents=True)
    (folder / f"step-{step}" / STATE).write_text(json.dumps({"step": step, "at_stop": at_stop}))


def one(folder: Path, keep_last: int, keep_every: int | None = None) -> Checkpoints:
    return Checkpoints([folder], keep_last=keep_last, keep_every=keep_every)


def test_the_newest_checkpoints_and_those_of_every_nth_step_are_kept(tmp_path: Path) -> None:
    for step in range(1, 8):
        save(tmp_path, step)
        remaining = one(tmp_path, 2, keep_every=3).prune(step)
    assert remaining == checkpoint_steps(tmp_path) == [3, 6, 7]


def test_no_manifests_of_checkpoints_that_were_kept_long_ago_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = list[str]()
    real = checkpoint_files.made_at_stop

    def made_at_stop(path: Path) -> bool:
        looked.append(path.name)
        return real(path)

    for step in range(1, 8):
        save(tmp_path, step)
    monkeypatch.setattr("services.policy_trainer.checkpoints.made_at_stop", made_at_stop)
    one(tmp_path, 2, keep_every=1).prune(7)
    assert looked == ["step-7", "step-6"]


def test_the_best_checkpoint_and_those_that_may_become_it_are_never_deleted(tmp_path: Path) -> None:
    kept = []
    best: tuple[tuple[int, Collection[int]], ...] = ((1, ()), (2, (1,)), (3, (1,)), (4, (3,)), (5, (1, 3, 9)))
    for step, keep in best:
        save(tmp_path, step)
        kept.append(one(tmp_path, 1).prune(step, keep))
    assert kept == [[1], [1, 2], [1, 3], [3, 4], [3, 5]]


def test_a_checkpoint_made_at_a_stop_does_not_replace_another(tmp_path: Path) -> None:
    kept = []
    for step, at_stop in ((2, False), (4, False), (5, True), (6, False), (7, True), (8, True), (10, False)):
        save(tmp_path, step, at_stop=at_stop)
        kept.append(one(tmp_path, 2).prune(step))
    assert kept == [[2], [2, 4], [2, 4, 5], [4, 6], [4, 6, 7], [4, 6, 8], [6, 10]]
    (tmp_path / "step-10" / STATE).write_text("not JSON")
    save(tmp_path, 12)
    assert one(tmp_path, 2).prune(12) == [10, 12]  # A damaged checkpoint is counted like any other.


def test_a_step_that_every_model_has_remains_when_one_of_them_has_not_saved_a_newer_one(tmp_path: Path) -> None:
    """A run can be resumed only from a step of which every model has a checkpoint."""
    policy, critic = tmp_path, tmp_path / "critic"
    both = Checkpoints([policy, critic], keep_last=1, keep_every=None)
    for folder in (policy, critic):
        save(folder, 2)
    save(policy, 4)
    assert both.steps() == [2]
    assert both.prune(2) == [2]
    assert checkpoint_steps(policy) == [2, 4]  # The other model may still be saving step 4.
    save(policy, 6)
    for step in (4, 6):
        save(critic, step)
    shutil.rmtree(critic / "step-4")  # Only one of the two saved step 4 before they were killed.
    assert both.prune(6) == [6]
    assert checkpoint_steps(policy) == checkpoint_steps(critic) == [6]


def test_checkpoints_of_steps_that_were_rolled_back_are_deleted(tmp_path: Path) -> None:
    for step in (1, 2, 4, 6):
        save(tmp_path, step)
    one(tmp_path, 4).discard_after(2)
    assert checkpoint_steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("call", range(1, 8))
def test_a_driver_killed_while_it_deletes_leaves_whole_checkpoints_and_the_next_one_deletes_the_rest(
    call: int, tmp_path: Path
) -> None:
    for step in range(1, 5):
        save(tmp_path, step)
    child = os.fork()
    if not child:
        calls = [0]

        def counted(real: Any) -> Any:
            def run(*arguments: Any, **options: Any) -> Any:
                calls[0] += 1
                if calls[0] == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **options)

            return run

        Path.rename, os.unlink, os.rmdir = counted(Path.rename), counted(os.unlink), counted(os.rmdir)  # type: ignore[method-assign]
        one(tmp_path, 1).prune(4)
        os._exit(0)
    os.waitpid(child, 0)
    assert all((tmp_path / f"step-{step}" / STATE).exists() for step in checkpoint_steps(tmp_path))
    assert checkpoint_steps(tmp_path)[-1] == 4
    assert one(tmp_path, 1).prune(4) == [4]
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]


def test_nothing_is_deleted_before_the_workers_have_answered(tmp_path: Path) -> None:
    """The scheduler learns what remains only after the older checkpoints are gone."""
    save(tmp_path, 2)
    seen: list[list[int]] = []

    class Workers:
        async def save_checkpoint(self, step: int, *, at_stop: bool) -> None:
            save(tmp_path, step, at_stop=at_stop)
            await asyncio.sleep(0)
            seen.append(checkpoint_steps(tmp_path))

    class Scheduler:
        async def checkpoint_saved(self, step: int, kept: list[int], *, at_stop: bool = False) -> None:
            seen.append(kept)
            assert kept == checkpoint_steps(tmp_path)

    async def work() -> None:
        topology = load(edited(make(tmp_path / "topology"), "  kl:\n    coef: 0.001\n", ""))
        publisher = Publisher(
            topology,
            cast(SchedulerCalls, Scheduler()),
            cast(WorkerDispatch, Workers()),
            ResumePoint(2, 2, 0, 2, checkpoint_now=False),
            one(tmp_path, 1),
        )
        await publisher.stop(4)
        await publisher.stop(4)

    (tmp_path / "topology").mkdir()
    asyncio.run(work())
    assert seen == [[2, 4], [2, 4]]  # A checkpoint made at a stop does not displace another.


def test_the_next_driver_deletes_what_a_killed_one_left_but_not_the_checkpoint_that_it_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver before it was killed between the save of step 4 and the deletion, and step 4 turned out damaged."""
    topology = load(edited(make(tmp_path), "  kl:\n    coef: 0.001\n", ""), ["checkpoint={every: 1, keep_last: 1}"])
    run = RunDir(tmp_path / "run", tmp_path, tmp_path)
    for step in (1, 2, 3, 4):
        save(run.checkpoints, step)

    async def resumed(*_: object, **__: object) -> ResumePoint:
        return ResumePoint(loaded, committed=4, lineage=0, checkpoint=3, checkpoint_now=False)

    class Ended(Exception):
        pass

    def driver(*_: object, **__: object) -> None:
        raise Ended

    async def life() -> None:
        trainer = PolicyTrainerService(run, 0)
        nothing: Any = None
        with pytest.raises(Ended):
            await trainer._train(topology, nothing, nothing)
        await trainer.close()

    monkeypatch.setattr(service, "resume", resumed)
    monkeypatch.setattr(service, "Driver", driver)
    for step, left in ((2, [2, 4]), (4, [4])):
        loaded = step
        asyncio.run(life())
        assert checkpoint_steps(run.checkpoints) == left

"""Tests that the checkpoint with the best evaluation is kept and exported. The driver, publisher and checkpoints are
real; a client answers in place of the scheduler and the worker.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file

from proto import messages
from proto.messages import CheckpointSaved, CommitStep, SaveCheckpoint, WaitEvals
from proto.registry import Message, Request
from services.policy_trainer.best import BestCheckpoint
from services.policy_trainer.checkpoints import Checkpoints
from services.policy_trainer.dispatch import WorkerDispatch
from services.policy_trainer.driver import Driver
from services.policy_trainer.publisher import Publisher
from services.policy_trainer.resume import ResumePoint
from services.policy_trainer.scheduler_calls import SchedulerCalls
from services.policy_trainer.trained_models import TrainedModels
from services.policy_trainer.worker import checkpoint
from services.policy_trainer.worker.checkpoint import SavedState
from shared.checkpoint_files import MODEL
from shared.ranks.layout import Layout
from shared.rpc.client import Client
from shared.rundir import RunDir, checkpoint_steps
from shared.topology import Topology, load
from shared.topology.models import POLICY
from tests.unit.policy_trainer.test_driver_order import TURNS, _answer
from tests.unit.shared.topology.small_topology import edited, make

STEPS = 6
LATE = 2
"""Number of steps between a version's commit and the end of its evaluation."""
METRIC = "eval/held/accuracy"


class Killed(Exception):
    """Raised by the call at which the driver is killed."""


class World:
    """The state that outlives a driver: its checkpoints on disk, the committed step and the evaluation results."""

    def __init__(self, folder: Path, results: dict[int, float], rows: dict[int, float] | None = None) -> None:
        path = edited(make(folder), "  kl:\n    coef: 0.001\n", "")
        more = [f"run.steps={STEPS}", "staleness=0", "data.eval.held.every=1", f"checkpoint.keep_best={METRIC}"]
        self.topology: Topology = load(path, [*more, "checkpoint.every=4", "checkpoint.keep_last=1"])
        self.run = RunDir(folder / "run", folder, folder)
        self.results = results
        self.rows = rows or {}
        self.committed = 0
        self.calls = 0
        self.die_at = math.inf
        self.best: BestCheckpoint
        self.kept: list[list[int]] = []
        """Checkpoints on disk after each save, as the scheduler is told."""

    async def call(self, request: Request, reply: type[Message], *, deadline_s: float) -> Message:
        self.calls += 1
        if self.calls >= self.die_at:
            raise Killed
        match request:
            case CommitStep():
                self.committed = max(self.committed, request.step)
                # If steps took no time, all of them would be complete before the first choice.
                while any(self.committed >= _end_of(step) for step in self.best.undecided):
                    await asyncio.sleep(0)
                    if self.calls >= self.die_at:  # another call was the last one
                        raise Killed
            case SaveCheckpoint():
                state = SavedState(request.step, {"w": torch.full((2, 2), float(request.step))}, {"o": torch.zeros(1)})
                checkpoint.save(self.run.checkpoints, state)
                return messages.Saved(path="", seconds=0.0)
            case CheckpointSaved():
                self.kept.append(request.kept)
            case WaitEvals():
                return await self._evaluated(request.step)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        return _answer(request)

    async def _evaluated(self, step: int) -> Message:
        while self.committed < _end_of(step):
            await asyncio.sleep(0)
        found = {"eval/held/rows_scored": self.rows.get(step, 8.0)}
        found |= {METRIC: self.results[step]} if step in self.results else {}
        return messages.EvalsDone(step=step, accuracy={}, metrics=found)

    def life(self, die_at: float = math.inf) -> bool:
        """Run the driver from the state on disk until it finishes or makes call number `die_at`; return whether it
        finished."""
        self.calls, self.die_at = 0, die_at

        async def work() -> None:
            client = cast(Client, self)
            scheduler, workers = (
                SchedulerCalls(client, 1),
                TrainedModels({POLICY: WorkerDispatch([client], Layout(1), 1)}),
            )
            workers[POLICY]._step = self.committed
            newest = max(checkpoint_steps(self.run.checkpoints), default=-1)
            best = self.best = BestCheckpoint(self.run, self.topology, scheduler, METRIC)
            for step in checkpoint_steps(self.run.checkpoints):
                best.add(step)
            standing = ResumePoint(self.committed, self.committed, 0, newest, checkpoint_now=False)
            publisher = Publisher(
                self.topology,
                scheduler,
                workers,
                standing,
                Checkpoints([self.run.checkpoints], keep_last=1, keep_every=None),
                best=best,
            )
            try:
                driver = Driver(
                    self.topology,
                    scheduler,
                    workers,
                    publisher,
                    standing,
                    lambda row: None,
                    exports={POLICY: self.run.export},
                )
                await driver.train()
            finally:
                await publisher.cancel()

        try:
            asyncio.run(work())
        except Killed:
            return False
        return True

    def exported(self) -> tuple[float, dict[str, object]]:
        """Return the step whose weights are exported, and the note beside them."""
        weights = load_file(self.run.export_best / MODEL)
        return float(weights["w"][0, 0]), json.loads(self.run.best_note.read_text())


def _end_of(step: int) -> int:
    """Return the step at whose commit the evaluation of `step` is complete."""
    return min(step + LATE, STEPS)


def new_world(tmp_path: Path, name: str, *results: object) -> World:
    folder = tmp_path / name
    folder.mkdir()
    return World(folder, *results)  # type: ignore[arg-type]


RESULTS = {1: 0.25, 2: 0.5, 3: 0.5, 4: 0.375, 5: 0.125, 6: 0.25}


def test_the_best_checkpoint_is_kept_beside_the_newest_and_the_earliest_among_equals_is_exported(
    tmp_path: Path,
) -> None:
    world = new_world(tmp_path, "w", RESULTS)
    assert world.life()
    assert checkpoint_steps(world.run.checkpoints) == [2, 6]
    assert world.exported() == (2.0, {"step": 2, "metric": METRIC, "value": 0.5})
    # A checkpoint whose evaluation is under way is kept, too, even though keep_last is 1.
    assert world.kept[2] == [1, 2, 3]
    assert (world.run.export_best / "tokenizer.json").is_file()


def test_a_driver_killed_at_any_call_makes_the_same_choice(tmp_path: Path) -> None:
    for first, lives in itertools.product(range(3, 40, 6), (1, 3)):
        world = new_world(tmp_path, f"{first}-{lives}", RESULTS)
        for more in range(lives):
            world.life(first + more)
        assert world.life()
        assert {2, 6} <= set(checkpoint_steps(world.run.checkpoints)), (first, lives)
        assert world.exported()[0] == 2.0, (first, lives)


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [({2: 3.0, 3: 3.0}, 4.0), ({}, 2.0)],
    ids=["rows were lost in the best evaluations", "all rows were scored"],
)
def test_a_mean_over_fewer_rows_is_not_preferred(rows: dict[int, float], chosen: float, tmp_path: Path) -> None:
    world = new_world(tmp_path, "w", RESULTS, rows)
    assert world.life()
    assert world.exported()[0] == chosen


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    world = new_world(tmp_path, "w", RESULTS)

    die_at = 10
    while not (world.run.checkpoints / "step-2").exists():
        assert not world.life(die_at)
        die_at += 1
    file = world.run.checkpoints / "step-2" / MODEL
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert world.life()
    assert world.exported()[0] == 3.0


def test_without_a_result_nothing_is_exported_and_only_the_newest_checkpoint_is_kept(tmp_path: Path) -> None:
    world = new_world(tmp_path, "w", {2: math.nan})
    assert world.life()
    assert checkpoint_steps(world.run.checkpoints) == [6]
    assert not world.run.export_best.exists()

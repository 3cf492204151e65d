"""Tests the order of the driver's actions with the real driver, publisher and dispatch. Clients record every call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from proto import messages
from proto.messages import (
    BatchMeta,
    Canary,
    CheckpointSaved,
    CommitStep,
    ErrorCode,
    FinishRun,
    NextBatch,
    Publish,
    PublishWeights,
    RunInfo,
    SaveCheckpoint,
    SaveModel,
    StepBatch,
    TaskHandle,
)
from proto.registry import Message, Request
from services.policy_trainer.checkpoints import Checkpoints
from services.policy_trainer.dispatch import WorkerDispatch
from services.policy_trainer.driver import Driver
from services.policy_trainer.publisher import Publisher
from services.policy_trainer.resume import ResumePoint
from services.policy_trainer.scheduler_calls import SchedulerCalls
from services.policy_trainer.service import PolicyTrainerService
from services.policy_trainer.trained_models import TrainedModels
from shared import topology as topologies
from shared.ranks.layout import Layout
from shared.rpc.client import Client
from shared.rpc.errors import RpcError, is_certain
from shared.rundir import RunDir
from shared.topology import Topology, load
from shared.topology.models import POLICY
from tests.unit.shared.topology.small_topology import edited, make
from tests.weights_refs import weights_ref

STEPS = 5
CANARY = Canary(token_ids=np.zeros(2, np.int32), logprobs=np.zeros(1, np.float32), tolerance=1e-4)
TURNS = 20
"""Number of turns of the event loop before an answer arrives, so that work that does not wait for the answer can get
ahead."""


@pytest.fixture
def topology(tmp_path: Path) -> Topology:
    path = edited(make(tmp_path), "  kl:\n    coef: 0.001\n", "")
    return load(path, [f"run.steps={STEPS}", "staleness=0", "checkpoint={every: 2, keep_last: 1}", "data.eval={}"])


def step_batch(step: int) -> StepBatch:
    tasks = [TaskHandle(f"train/{step}/{index}", 1, 2, 10, 0, []) for index in range(6)]
    samples = 2 * len(tasks)
    return StepBatch(
        step=step,
        batch=BatchMeta(tasks=tasks),
        scalars={
            "reward": np.arange(samples, dtype=np.float32) % 2,
            "length": np.full(samples, 5, np.int32),
            "loss_tokens": np.full(samples, 5, np.int32),
            "truncated": np.zeros(samples, np.uint8),
            "version_min": np.full(samples, step - 1, np.int32),
        },
    )


class Recorder:
    """A recorder that acts as both scheduler and worker for a driver. `calls` records each call and each answer."""

    def __init__(self, on_call: Callable[[Request], None] = lambda request: None) -> None:
        self.calls: list[tuple[str, Request]] = []
        self._on_call = on_call

    async def call(self, request: Request, reply: type[Message], *, deadline_s: float) -> Message:
        self.calls.append(("asked", request))
        self._on_call(request)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        self.calls.append(("answered", request))
        return _answer(request)

    def at(self, moment: str, kind: type[Request], step: int) -> int:
        """Return the index of the only call of this kind for this step, or of its answer."""
        [found] = [
            index
            for index, (each, request) in enumerate(self.calls)
            if each == moment and isinstance(request, kind) and _step_of(request) == step
        ]
        return found

    def steps(self, kind: type[Request]) -> list[int]:
        return [_step_of(request) for moment, request in self.calls if moment == "answered" and type(request) is kind]


def _step_of(request: Any) -> int:
    return int(request.ref.step if isinstance(request, PublishWeights) else request.step)


def _answer(request: Request) -> Message:
    match request:
        case NextBatch():
            return step_batch(request.step)
        case messages.ForwardBackward():
            return messages.ForwardBackwardDone(sums={"tokens": 60.0}, seconds=0.0)
        case messages.OptimStep():
            return messages.OptimStepDone(grad_norm=1.0, lr=1e-3, seconds=0.0)
        case Publish():
            ref = weights_ref(request.lineage, request.step, CANARY, nbytes=64, store=request.store)
            return messages.Published(ref=ref, seconds=0.0)
        case SaveCheckpoint() | SaveModel():
            return messages.Saved(path="", seconds=0.0)
        case messages.WaitEvals():
            return messages.EvalsDone(step=request.step, accuracy={})
    return messages.Ack()


def train(
    topology: Topology, recorder: Recorder, standing: ResumePoint, stop: asyncio.Event | None = None
) -> list[int]:
    """Run the driver once; return the steps that it announced it would save because of a stop."""
    said: list[int] = []

    async def life() -> None:
        client = cast(Client, recorder)
        scheduler, workers = SchedulerCalls(client, 1), TrainedModels({POLICY: WorkerDispatch([client], Layout(1), 1)})
        workers[POLICY]._step = standing.version
        publisher = Publisher(
            topology,
            scheduler,
            workers,
            standing,
            Checkpoints([Path("no checkpoints")], keep_last=1, keep_every=None),
            on_stop=said.append,
        )
        try:
            driver = Driver(
                topology,
                scheduler,
                workers,
                publisher,
                standing,
                lambda row: None,
                stop,
                exports={POLICY: Path("export")},
            )
            await driver.train()
        finally:
            await publisher.cancel()

    asyncio.run(life())
    return said


def fresh(version: int = 0, committed: int = 0, checkpoint: int = -1) -> ResumePoint:
    return ResumePoint(version, committed, lineage=0, checkpoint=checkpoint, checkpoint_now=False)


def test_a_step_is_committed_before_its_weights_are_published_or_saved(topology: Topology) -> None:
    recorder = Recorder()
    train(topology, recorder, fresh())
    assert recorder.steps(CommitStep) == [1, 2, 3, 4, 5]
    assert sorted(recorder.steps(PublishWeights)) == [0, 1, 2, 3, 4, 5]
    for step in range(1, STEPS + 1):
        committed = recorder.at("answered", CommitStep, step)
        assert committed < recorder.at("asked", Publish, step)
        assert committed < recorder.at("asked", PublishWeights, step)
        if step < STEPS:
            assert committed < recorder.at("asked", NextBatch, step + 1)
    assert recorder.steps(SaveCheckpoint) == [2, 4, 5]
    for step in (2, 4, 5):
        assert recorder.at("answered", CommitStep, step) < recorder.at("asked", SaveCheckpoint, step)
        assert recorder.at("answered", SaveCheckpoint, step) < recorder.at("asked", CheckpointSaved, step)
    assert isinstance(recorder.calls[-1][1], FinishRun)


def test_replayed_steps_are_not_committed_published_or_saved_again(topology: Topology) -> None:
    recorder = Recorder()
    train(topology, recorder, fresh(version=1, committed=3, checkpoint=2))
    assert recorder.steps(NextBatch) == [2, 3, 4, 5]
    assert recorder.steps(CommitStep) == [4, 5]
    assert recorder.steps(PublishWeights) == [3, 4, 5]
    assert recorder.steps(SaveCheckpoint) == [4, 5]


def test_a_stop_finishes_the_open_step_and_saves_it(topology: Topology) -> None:
    stop = asyncio.Event()
    recorder = Recorder(lambda request: stop.set() if isinstance(request, messages.OptimStep) else None)
    assert train(topology, recorder, fresh(), stop) == [1]
    assert recorder.steps(CommitStep) == [1]
    assert recorder.steps(SaveCheckpoint) == [1]
    saved = recorder.calls[-1]
    assert saved == ("answered", CheckpointSaved(driver=1, step=1, kept=[], at_stop=True))
    assert not [request for _, request in recorder.calls if isinstance(request, FinishRun | SaveModel)]


def test_a_stop_while_the_driver_waits_for_a_batch_saves_the_committed_step_at_once(topology: Topology) -> None:
    stop = asyncio.Event()
    recorder = Recorder(lambda request: stop.set() if request == NextBatch(driver=1, step=4) else None)
    assert train(topology, recorder, fresh(), stop) == [3]
    assert recorder.steps(CommitStep) == [1, 2, 3]
    assert recorder.steps(SaveCheckpoint) == [2, 3]
    kinds = [(request.step, request.at_stop) for _, request in recorder.calls if isinstance(request, SaveCheckpoint)]
    assert dict(kinds) == {2: False, 3: True}


@pytest.mark.parametrize("standing", [fresh(), fresh(2, 2, checkpoint=2)], ids=["nothing trained", "saved before"])
def test_a_stop_with_nothing_to_save_ends_the_driver_at_once(topology: Topology, standing: ResumePoint) -> None:
    stop = asyncio.Event()
    stop.set()
    recorder = Recorder()
    assert train(topology, recorder, standing, stop) == []
    assert not [request for _, request in recorder.calls if isinstance(request, NextBatch | SaveCheckpoint)]


def test_a_stop_during_a_replay_saves_the_committed_step(topology: Topology) -> None:
    stop = asyncio.Event()
    stop.set()
    recorder = Recorder()
    assert train(topology, recorder, fresh(version=0, committed=3), stop) == [3]
    assert recorder.steps(NextBatch) == [1, 2, 3]
    assert recorder.steps(CommitStep) == []
    assert recorder.steps(SaveCheckpoint) == [3]


def test_a_stop_waits_for_the_checkpoint_that_is_being_saved(topology: Topology) -> None:
    """Step 2 is saved as scheduled, and the stop arrives before the scheduler has heard of the checkpoint."""
    stop = asyncio.Event()
    recorder = Recorder(lambda request: stop.set() if request == NextBatch(driver=1, step=3) else None)
    assert train(topology, recorder, fresh(), stop) == [2]
    [saved] = [request for moment, request in recorder.calls if moment == "answered" and _is_save(request)]
    assert saved == CheckpointSaved(driver=1, step=2, kept=[])


def _is_save(request: Request) -> bool:
    return isinstance(request, CheckpointSaved)


@pytest.mark.parametrize(
    ("code", "certain"), [(ErrorCode.BAD_DATA, True), (ErrorCode.BAD_REQUEST, True), (ErrorCode.CONFLICT, False)]
)
def test_bad_data_ends_the_driver_with_an_error_that_prevents_a_restart(
    code: ErrorCode, certain: bool, topology: Topology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def standing(_: SchedulerCalls) -> RunInfo:
        return RunInfo(steps=5, committed_step=3, open_step=0, lineage=0, checkpoint_step=-1)

    async def refused(*_: object) -> None:
        raise RpcError(code, "rollout/0: the judge has not answered for 600 s")

    monkeypatch.setattr(topologies, "load_resolved", lambda _: topology)
    monkeypatch.setattr(SchedulerCalls, "run_info", standing)
    monkeypatch.setattr(PolicyTrainerService, "_train", refused)

    async def life() -> bool:
        driver = PolicyTrainerService(run, 0)
        with pytest.raises(RpcError, match="judge") as raised:
            await driver.serve()
        await driver.close()
        return is_certain(raised.value)

    run = RunDir.create(tmp_path / "run", shm_root=tmp_path / "shm")
    try:
        assert asyncio.run(life()) == certain
    finally:
        run.remove_volatile()


def test_a_snapshot_is_kept_every_few_steps_under_the_lineage(topology: Topology, tmp_path: Path) -> None:
    """A replayed step also keeps a snapshot. Only the last update of a step keeps one."""
    other = tmp_path / "other"
    other.mkdir()
    path = edited(make(other), "  kl:\n    coef: 0.001\n", "")
    few = load(
        path,
        [
            f"run.steps={STEPS}",
            "staleness=0",
            "data.eval={}",
            "checkpoint.memory_every=2",
            "algorithm.num_iterations=2",
            "algorithm.loss.anchor=rollout",
        ],
    )
    recorder = Recorder()
    train(few, recorder, ResumePoint(1, 2, 7, -1, checkpoint_now=False))
    steps = [each for moment, each in recorder.calls if moment == "asked" and isinstance(each, messages.OptimStep)]
    kept = [(each.step, each.last, each.snapshot_lineage) for each in steps if each.snapshot_lineage >= 0]
    assert kept == [(2, True, 7), (4, True, 7)]
    assert len(steps) == 2 * 4

"""Tests a driver of a policy and a critic, with the real publisher and dispatches. Clients record every call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from msgspec import structs

from proto import messages
from proto.messages import (
    BatchMeta,
    BatchPart,
    CommitStep,
    Credit,
    CreditDone,
    ErrorCode,
    Forward,
    ForwardBackward,
    ForwardDone,
    HeldSnapshot,
    LoadCheckpoint,
    OptimStep,
    Publish,
    SaveCheckpoint,
    SaveModel,
    SkipUpdate,
    WorkerReady,
    WorkerState,
)
from proto.registry import Message, Request
from services.policy_trainer.checkpoints import Checkpoints
from services.policy_trainer.dispatch import WorkerDispatch, WorkersLost
from services.policy_trainer.driver import Driver
from services.policy_trainer.publisher import Publisher
from services.policy_trainer.resume import ResumePoint
from services.policy_trainer.scheduler_calls import SchedulerCalls
from services.policy_trainer.trained_models import TrainedModels
from shared.ranks.layout import Layout
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.stages import CREDIT, VALUES
from shared.topology import Topology, load
from shared.topology.models import CRITIC, POLICY
from tests.unit.policy_trainer.test_driver_order import TURNS, _answer
from tests.unit.shared.topology.small_topology import edited, make

STEPS = 4
PPO = (
    f"run.steps={STEPS}",
    "staleness=0",
    "data.eval={}",
    "checkpoint={every: 2, keep_last: 1}",
    "algorithm.advantage={name: gae, lam: 0.95}",
    "critic={optimizer: {lr: 1.0e-3}, num_iterations: 2}",
)


def ppo(folder: Path, *overrides: str) -> Topology:
    folder.mkdir(exist_ok=True)
    return load(edited(make(folder), "  kl:\n    coef: 0.001\n", ""), [*PPO, *overrides])


@pytest.fixture
def topology(tmp_path: Path) -> Topology:
    return ppo(tmp_path / "ppo")


class Log:
    """All calls of a driver and their answers, in order: who was called, and "asked" or "answered"."""

    def __init__(self, on_call: Callable[[str, Request], Message | None] = lambda *_: None) -> None:
        self.calls: list[tuple[str, str, Request]] = []
        self.on_call = on_call

    def client(self, name: str) -> Client:
        return cast(Client, _Named(self, name))

    def asked(self, name: str, *kinds: type[Request]) -> list[Any]:
        """Return what `name` was asked, of these kinds."""
        return [
            request
            for who, moment, request in self.calls
            if who == name and moment == "asked" and isinstance(request, kinds)
        ]

    def at(self, name: str, moment: str, kind: type[Request], number: int = 0) -> int:
        """Return the position of a call of this kind to `name`, or of its answer."""
        positions = [
            position
            for position, (who, when, request) in enumerate(self.calls)
            if (who, when) == (name, moment) and isinstance(request, kind)
        ]
        return positions[number]


class _Named:
    def __init__(self, log: Log, name: str) -> None:
        self.log, self.peer = log, name

    async def call(self, request: Request, reply: type[Message], *, deadline_s: float) -> Message:
        self.log.calls.append((self.peer, "asked", request))
        for _ in range(TURNS):
            await asyncio.sleep(0)
        special = self.log.on_call(self.peer, request)
        self.log.calls.append((self.peer, "answered", request))
        return special or answer(request)


def answer(request: Request) -> Message:
    match request:
        case Forward():
            scalars = {"value_after": np.zeros(12, np.float32)} if request.ends else {}
            meta = _made(request.batch, VALUES.name if "values" in request.keys else "proximal", request.keys)
            return ForwardDone(meta=structs.replace(meta, scalars=scalars), seconds=0.25)
        case Credit():
            tasks = len(request.batch.tasks)
            names = ("mean", "squares", "return_mean", "return_squares", "error_mean", "error_squares")
            statistics = {"count": np.full(tasks, 5.0), **{name: np.ones(tasks) for name in names}}
            meta = _made(request.batch, CREDIT.name, CREDIT.makes)
            return CreditDone(meta=meta, statistics=statistics, seconds=0.0)
        case SkipUpdate():
            return WorkerReady(step=request.step, parameters=1)
        case messages.GetWorkerState():
            return WorkerState(step=request.at_least and 0, driver=1, order=request.at_least, dirty=False)
    return _answer(request)


def _made(batch: BatchMeta, stage: str, keys: Sequence[str]) -> BatchMeta:
    parts = [BatchPart(stage, [f"{key}:1-1" for key in keys])]
    tasks = [messages.TaskHandle(task.task_id, task.fence, task.samples, task.tokens, 4, [0]) for task in batch.tasks]
    return BatchMeta(tasks=tasks, parts=parts, stores=["batch-store/0"])


def train(topology: Topology, log: Log) -> list[dict[str, float]]:
    """Run the driver from the start to the end and return its rows."""
    rows: list[dict[str, float]] = []

    async def life() -> None:
        scheduler = SchedulerCalls(log.client("scheduler"), 1)
        models = {name: WorkerDispatch([log.client(name)], Layout(1), 1) for name in (POLICY, CRITIC)}
        for dispatch in models.values():
            dispatch._step = 0
        workers = TrainedModels(models)
        standing = ResumePoint(0, 0, lineage=0, checkpoint=-1, checkpoint_now=False)
        checkpoints = Checkpoints([Path("no checkpoints")], keep_last=1, keep_every=None)
        publisher = Publisher(topology, scheduler, workers, standing, checkpoints)
        try:
            exports = {model.name: model.exported(Path("run")) for model in topology.trained}
            await Driver(topology, scheduler, workers, publisher, standing, rows.append, exports=exports).train()
        finally:
            await publisher.cancel()

    asyncio.run(life())
    return rows


def test_both_models_pass_forward_and_update_at_the_same_time_and_a_step_is_committed_after_both(
    tmp_path: Path,
) -> None:
    log = Log()
    train(ppo(tmp_path / "two", "algorithm.num_iterations=2"), log)
    forwards = [log.at(name, "asked", Forward) for name in (POLICY, CRITIC)]
    assert max(forwards) < min(log.at(name, "answered", Forward) for name in (POLICY, CRITIC))
    assert log.at(POLICY, "answered", Forward) < log.at(POLICY, "asked", Credit)
    assert log.at(CRITIC, "answered", Forward) < log.at(POLICY, "asked", Credit)
    credited = log.at(POLICY, "answered", Credit)
    first = [log.at(name, "asked", ForwardBackward) for name in (POLICY, CRITIC)]
    assert credited < min(first)
    assert max(first) < min(log.at(name, "answered", ForwardBackward) for name in (POLICY, CRITIC))
    for step in range(STEPS):
        committed = log.at("scheduler", "asked", CommitStep, step)
        assert all(log.at(name, "answered", OptimStep, 2 * step + 1) < committed for name in (POLICY, CRITIC))


def test_the_critic_learns_the_returns_of_the_tokens_and_nothing_of_it_is_published(topology: Topology) -> None:
    log = Log()
    rows = train(topology, log)
    losses = {request.loss.name for request in log.asked(CRITIC, ForwardBackward)}
    assert losses == {"value"}
    assert len(log.asked(CRITIC, OptimStep)) == 2 * STEPS
    assert len(log.asked(POLICY, OptimStep)) == STEPS
    for request in log.asked(CRITIC, ForwardBackward):
        assert request.batch.scalars.keys() == {"weights"}
        assert {part.stage for part in request.batch.parts} >= {VALUES.name, CREDIT.name}
    assert not log.asked(CRITIC, Publish)
    assert {request.optimizer.lr for request in log.asked(CRITIC, OptimStep)} == {1e-3}
    paths = {name: [request.path for request in log.asked(name, SaveModel)] for name in (POLICY, CRITIC)}
    assert paths == {POLICY: ["run/export"], CRITIC: ["run/export-critic"]}
    assert [request.step for request in log.asked(CRITIC, SaveCheckpoint)] == [2, 4]
    assert rows[0]["critic/lr"] == 1e-3
    assert rows[0]["critic/explained_variance"] == 0.0
    assert rows[0]["time/values"] == 0.25


def test_while_only_the_critic_learns_the_policy_counts_steps_and_keeps_snapshots(tmp_path: Path) -> None:
    log = Log()
    overrides = ("critic.warmup_steps=2", "algorithm.num_iterations=2", "optimizer.warmup_steps=2")
    rows = train(ppo(tmp_path / "warm", *overrides), log)
    skipped = log.asked(POLICY, SkipUpdate)
    assert [(request.step, request.last, request.snapshot_lineage) for request in skipped] == [
        (1, True, 0),
        (2, True, 0),
    ]
    assert {request.step for request in log.asked(POLICY, ForwardBackward, OptimStep) if hasattr(request, "step")} == {
        3,
        4,
    }
    assert len(log.asked(POLICY, Forward)) == 2
    assert len(log.asked(CRITIC, OptimStep)) == 2 * STEPS
    rates = {request.step: request.optimizer.lr for request in log.asked(POLICY, OptimStep)}
    assert rates[4] == pytest.approx(2 * rates[3])  # The schedule of the policy begins with its first update.
    assert not rows[0].keys() & {"loss/policy", "policy/lr"}
    assert "loss/policy" in rows[2]


def test_a_bad_update_of_one_model_skips_that_update_only(tmp_path: Path) -> None:
    def refused(name: str, request: Request) -> Message | None:
        if name == CRITIC and isinstance(request, OptimStep) and request.step == 2 and not request.last:
            raise RpcError(ErrorCode.BAD_DATA, "gradient norm is nan", names=["train/2/0"])
        if isinstance(request, messages.GetWorkerState):
            return WorkerState(step=1, driver=1, order=request.at_least, dirty=False)
        return None

    log = Log(refused)
    rows = train(ppo(tmp_path / "skip", "run.on_bad_step=skip"), log)
    assert [request.step for request in log.asked(CRITIC, SkipUpdate)] == [2]
    assert not log.asked(POLICY, SkipUpdate)
    assert len(log.asked(POLICY, OptimStep)) == STEPS
    assert [row["critic/updates_skipped"] for row in rows] == [0, 1, 0, 0]
    assert [row["policy/updates_skipped"] for row in rows] == [0, 0, 0, 0]


def test_bad_credit_skips_the_step_for_both_models(tmp_path: Path) -> None:
    def refused(name: str, request: Request) -> Message | None:
        if isinstance(request, Credit) and request.batch.tasks[0].task_id.startswith("train/3/"):
            raise RpcError(ErrorCode.BAD_DATA, "train/3/0: advantage gae returned nan", names=["train/3/0"])
        if isinstance(request, messages.GetWorkerState):
            return WorkerState(step=2, driver=1, order=request.at_least, dirty=False)
        return None

    log = Log(refused)
    rows = train(ppo(tmp_path / "credit", "run.on_bad_step=skip"), log)
    assert [[request.step for request in log.asked(name, SkipUpdate)] for name in (POLICY, CRITIC)] == [[3], [3]]
    assert [row["critic/updates_skipped"] for row in rows] == [0, 0, 1, 0]


def test_values_after_the_end_reach_the_estimator_if_truncated_samples_go_on(tmp_path: Path) -> None:
    log = Log()
    train(ppo(tmp_path / "ends", "algorithm.advantage.truncated=bootstrap"), log)
    assert all(request.ends for request in log.asked(CRITIC, Forward))
    for request in log.asked(POLICY, Credit):
        assert request.credit.bootstrap
        assert request.credit.values
        assert request.batch.scalars.keys() == {"shaped", "loss_tokens", "truncated", "value_after"}


# ---- the state of both


def models(states: dict[str, WorkerState], on_call: Callable[[str, Request], Message | None] = lambda *_: None) -> Any:
    def given(name: str, request: Request) -> Message | None:
        special = on_call(name, request)
        return states[name] if special is None and isinstance(request, messages.GetWorkerState) else special

    log = Log(given)
    return log, TrainedModels({name: WorkerDispatch([log.client(name)], Layout(1), 1) for name in states})


def state(step: int, *snapshots: int, dirty: bool = False) -> WorkerState:
    rows = [HeldSnapshot(lineage=0, step=each) for each in snapshots]
    return WorkerState(step=step, driver=1, order=0, dirty=dirty, snapshots=rows)


def test_models_at_different_steps_are_dirty_and_only_common_snapshots_count() -> None:
    _, workers = models({POLICY: state(7, 6, 7), CRITIC: state(6, 5, 6)})
    found = asyncio.run(workers.take_over())
    assert (found.step, found.dirty) == (6, True)
    assert [snapshot.step for snapshot in found.snapshots] == [6]
    _, workers = models({POLICY: state(7, 6, 7), CRITIC: state(7, 6, 7)})
    assert not asyncio.run(workers.take_over()).dirty
    _, workers = models({POLICY: state(7), CRITIC: state(7, dirty=True)})
    assert asyncio.run(workers.take_over()).dirty


def test_a_state_that_one_model_lacks_is_refused_for_both() -> None:
    def missing(name: str, request: Request) -> Message | None:
        if name == CRITIC and isinstance(request, LoadCheckpoint):
            raise RpcError(ErrorCode.MISSING, "checkpoint step-4: does not exist")
        return WorkerReady(step=4, parameters=1) if isinstance(request, LoadCheckpoint) else None

    _, workers = models({POLICY: state(0), CRITIC: state(0)}, missing)
    with pytest.raises(RpcError, match="does not exist") as raised:
        asyncio.run(workers.load_checkpoint(4))
    assert raised.value.code == ErrorCode.MISSING


def test_an_error_that_says_more_than_that_workers_are_lost_comes_first() -> None:
    def failing(name: str, request: Request) -> Message | None:
        if isinstance(request, SaveCheckpoint):
            code = ErrorCode.LOST if name == POLICY else ErrorCode.INTERNAL
            raise RpcError(code, f"{name}: {'gone' if name == POLICY else 'disk full'}")
        return None

    _, workers = models({POLICY: state(1), CRITIC: state(1)}, failing)
    with pytest.raises(RpcError, match="disk full"):
        asyncio.run(workers.save_checkpoint(1))
    _, workers = models(
        {POLICY: state(1), CRITIC: state(1)},
        lambda name, request: failing(name, request) if name == POLICY else None,
    )
    with pytest.raises(WorkersLost, match="gone"):
        asyncio.run(workers.save_checkpoint(1))

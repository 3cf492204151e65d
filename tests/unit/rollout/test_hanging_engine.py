"""An engine that hangs loses its leases and then its process; no sample is counted as failed because of the hang."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from proto.messages import BatchMeta, ErrorCode, LeaseGrant, TaskHandle
from services.rollout.sampling.prompts import PromptBuilder
from services.rollout.sampling.tasks import PreparedTasks, ReadyTask
from services.rollout.sampling.trajectory import BlockVersions, Made
from services.rollout.user_code.frames import Failed
from services.rollout.workflows.openai_endpoint import OpenAIEndpoint
from services.rollout.workflows.runner import WATCH_S, Attempt, WorkflowRunner
from shared.lease import Lease, LeaseBook, LeaseLost
from shared.pipeline import LeasePipeline
from shared.rpc.errors import RpcError
from tests.unit.rollout.rollout_engine import MODEL, sampling
from tests.unit.rollout.told_engine import ToldEngine

pytestmark = pytest.mark.slow

SAMPLES = 2
LEASE_S = 0.1


def lease_of(computing: Callable[[], int], number: int = 1) -> Lease:
    grant = LeaseGrant(
        lease_id=number,
        stage="rollout",
        split="train",
        lease_s=LEASE_S,
        batch=BatchMeta(tasks=[]),
        group_size=SAMPLES,
        block_rows=0,
    )
    return Lease(grant, computing)


# ---- a workflow with an engine that hangs


class ImpatientPool:
    """A pool whose samples make one call each and all time out once the engine is working on these calls."""

    lost = 0

    def __init__(self, reached: asyncio.Event) -> None:
        self._reached = reached
        self.left = SAMPLES
        self.over = asyncio.Event()

    async def make(self, new_attempt: Callable[[], Attempt]) -> tuple[Failed, Attempt]:
        attempt = new_attempt()
        calls = attempt.calls
        call = asyncio.create_task(calls.chat([{"role": "user", "content": "1+1="}], None))
        await self._reached.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        self.left -= 1
        if not self.left:
            self.over.set()
        return Failed(0, "no trajectory within 1 s"), attempt


@dataclass
class Workflow:
    """A running workflow. All samples of its lease have timed out, but the engine is still in the second step of their
    calls."""

    engine: ToldEngine
    lease: Lease
    running: asyncio.Task[list[list[Made]]]
    go_on: asyncio.Event


async def over_a_hanging_engine() -> Workflow:
    engine, reached, go_on = ToldEngine(), asyncio.Event(), asyncio.Event()

    async def before_step(number: int) -> None:
        if number == 2:
            reached.set()
            await go_on.wait()

    engine.before_step = before_step
    pool = ImpatientPool(reached)

    async def on_text(work: Callable[[], Any]) -> Any:
        return work()

    runner = WorkflowRunner(
        "my:workflow",
        pool,  # type: ignore[arg-type]
        OpenAIEndpoint("tiny"),
        engine=engine,
        prompts=PromptBuilder(MODEL, add_generation_prompt=True),
        on_text=on_text,
        max_tokens=1000,
    )
    lease = lease_of(lambda: engine.progress)
    tasks = PreparedTasks([ReadyTask(TaskHandle("train/0/0", 1), {}, [1])], [], sampling(SAMPLES), 2)
    running = asyncio.create_task(runner.run(lease, tasks, BlockVersions(0, 0)))
    await pool.over.wait()
    return Workflow(engine, lease, running, go_on)


async def stands(running: asyncio.Task[Any]) -> bool:
    """Return whether `running` is still unfinished after several rounds of the watch."""
    done, _ = await asyncio.wait({running}, timeout=3 * WATCH_S)
    return not done


def test_samples_that_wait_for_a_hanging_engine_neither_fail_nor_renew_their_lease() -> None:
    async def scenario() -> None:
        made = await over_a_hanging_engine()
        before = made.lease.progress
        assert await stands(made.running)
        assert made.lease.progress == before  # The lease therefore expires.
        made.lease.give_up()
        assert await stands(made.running)  # The engine is still busy.
        made.go_on.set()
        with pytest.raises(LeaseLost):
            await made.running

    asyncio.run(scenario())


def test_samples_that_wait_too_long_for_a_slow_engine_fail() -> None:
    async def scenario() -> None:
        made = await over_a_hanging_engine()
        assert await stands(made.running)
        made.go_on.set()
        (group,) = await made.running
        assert [each.score is not None and each.score.value is None for each in group] == [True] * SAMPLES
        assert made.engine.progress == 1  # Abandoned calls are not sampled to completion.

    asyncio.run(scenario())


# ---- the pipeline of leases


@dataclass
class Pipeline:
    """A pipeline that computes one lease at a time with `compute`."""

    compute: Callable[[Lease], Any]
    progress: int = 0
    leases: list[Lease] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)

    async def run(self) -> None:
        service = SimpleNamespace(log=structlog.get_logger())
        self.book = LeaseBook(service, "rollout", lambda: self.progress)  # type: ignore[arg-type]
        pipeline: LeasePipeline[int, int] = LeasePipeline(
            self.book, acquire=self._acquire, prepare=self._prepare, compute=self._compute, finish=self._finish
        )
        await pipeline.run()

    async def _acquire(self) -> Lease:
        if len(self.leases) == 2:
            await asyncio.Event().wait()
        self.leases.append(lease_of(lambda: self.progress, len(self.leases) + 1))
        return self.leases[-1]

    async def _prepare(self, lease: Lease) -> int:
        return lease.grant.lease_id

    async def _compute(self, lease: Lease, prepared: int) -> int:
        await self.compute(lease)
        return prepared

    async def _finish(self, lease: Lease, prepared: int, computed: int) -> None:
        self.finished.append(computed)


async def never(lease: Lease) -> None:
    lease.give_up()
    await asyncio.Event().wait()


def test_a_stalled_computation_that_outlives_its_lost_lease_ends_the_service() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(20):
            with pytest.raises(RpcError, match=r"lease 1 was lost, and 0.1 s later .* it is hanging") as failed:
                await Pipeline(never).run()
        assert failed.value.code == ErrorCode.INTERNAL

    asyncio.run(scenario())


def test_a_computation_that_ignores_its_cancellation_does_not_keep_the_service_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shared.pipeline.STOP_S", 0.1)

    async def scenario() -> None:
        over = asyncio.Event()

        async def deaf(lease: Lease) -> None:
            lease.give_up()
            while not over.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await over.wait()

        running = asyncio.create_task(Pipeline(deaf).run())
        done, _ = await asyncio.wait({running}, timeout=20)
        over.set()
        with pytest.raises(RpcError, match="it is hanging"):
            await running
        assert done

    asyncio.run(scenario())


@pytest.mark.parametrize("why", ["moves", "others have the devices"])
def test_pipeline_waits_for_an_abandoned_computation_that_makes_progress_or_waits_for_the_devices(why: str) -> None:
    async def scenario() -> list[int]:
        async def slow(lease: Lease) -> None:
            if lease.grant.lease_id == 2:
                made.progress += 1
                return
            lease.give_up()
            for _ in range(8):
                made.progress += why == "moves"
                made.book.blocked_on_devices = lambda: why != "moves"
                await asyncio.sleep(LEASE_S / 2)  # The elapsed time is the subject of the test.
            raise LeaseLost("given up at last")

        made = Pipeline(slow)
        running = asyncio.create_task(made.run())
        async with asyncio.timeout(20):
            while not made.finished:
                await asyncio.wait({running}, timeout=0.01)
                assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return made.finished

    assert asyncio.run(scenario()) == [2]

"""Loads a scheduler with many live tasks and times it, alone (`measure_state`) and over its socket (`measure_socket`).

A task has two stages (rollout, reference), a group of 8 and three scalars per sample. The load plays the part of all
other services and does the least work that the protocol allows, so that the scheduler alone is timed. Over the socket,
the process is killed and restarted when all tasks are ready; the time until it answers is how long its replay takes.
`python -m tests.bench.scheduler_load [TASKS]...` prints both as tables.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import zmq

from proto.ids import new_incarnation
from proto.messages import (
    Ack,
    Canary,
    Clear,
    CommitStep,
    Complete,
    CompleteAck,
    ErrorCode,
    GetInventory,
    GetRunInfo,
    GetStatus,
    Inventory,
    LeaseGrant,
    LeaseRequest,
    NextBatch,
    Outcome,
    PublishWeights,
    Register,
    Registered,
    RunInfo,
    Status,
    StepBatch,
    TaskResult,
)
from services.scheduler.events import Answer, Asked, ClearDone, Configure, Effect, SendClear
from services.scheduler.plan import Plan
from services.scheduler.state import Scheduler
from services.scheduler.tasks import TaskState
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import Call, Mailbox
from shared.rundir import RunDir
from shared.stages import REFERENCE, ROLLOUT
from tests.bench.turns import heading, versions
from tests.weights_refs import weights_ref

GROUP = 8
STEP_TASKS = 1250
"""Tasks per step. A batch's scalars travel inside a control message, which limits each column to 64 KiB."""
BLOCK = 250
SINGLES = 10_000
IN_FLIGHT = 64
CALL_S = 60.0
SETTLE_S = 0.5
SETTLE_ROUNDS = 24
"""Number of rounds without a decrease after which memory is considered settled."""
CANARY = Canary(token_ids=np.zeros(2, np.int32), logprobs=np.zeros(1, np.float32), tolerance=1e-4)
STAGES = ("rollout", "reference")
SCALARS = {"reward": np.float32, "length": np.int32, "version_min": np.int32}
"""Names of the per-sample scalars of the rollout stage."""


@dataclass(frozen=True)
class Figures:
    """Figures of one load. `bytes_a_task` is the growth of the process's resident memory per task, while no snapshot is
    in progress; rates are per second."""

    tasks: int
    bytes_a_task: float
    leases_in_batches: float
    results: float
    single_leases: float
    collected: float
    longest_stall_s: float
    """Longest time that any request took during the measurement, in seconds."""
    restart_s: float = 0.0
    """Seconds from the start of a process that replays the journal of all tasks to its first reply."""


def result_of(grant: LeaseGrant, incarnation: int, chance: np.random.Generator) -> Complete:
    """Return results for every task of the grant, with realistic scalars."""
    rollout = grant.stage == STAGES[0]
    results = [
        TaskResult(
            task.task_id,
            task.fence,
            Outcome.DONE,
            "batch-store/0",
            int(chance.integers(1 << 63)),
            GROUP if rollout else 0,
            GROUP * 500,
            GROUP * 6500,
        )
        for task in grant.batch.tasks
    ]
    count = GROUP * len(results)
    columns = {name: np.zeros(count, dtype) for name, dtype in SCALARS.items()}
    columns |= {"reward": chance.random(count, np.float32), "length": chance.integers(1, 500, count).astype(np.int32)}
    return Complete(
        lease_id=grant.lease_id,
        stage=grant.stage,
        incarnation=incarnation,
        results=results,
        scalars=columns if rollout else {},
    )


def lease_request(life: int, most: int, stage: str = STAGES[0]) -> LeaseRequest:
    return LeaseRequest(stage=stage, service=stage, instance=0, incarnation=life, max_tasks=most)


def registration(service: str, life: int) -> Register:
    return Register(service=service, instance=0, incarnation=life, pid=1, host="here", endpoint="", limit_bytes=1 << 50)


# ---------------------------------------------------------------------------------------------- the state machine


class StateLoad:
    """The state machine alone, without socket or journal."""

    def __init__(self, tasks: int) -> None:
        steps = tasks // STEP_TASKS
        self.plan = Plan(
            run="load",
            seed=1,
            tasks_per_step=STEP_TASKS,
            group_size=GROUP,
            staleness=steps - 1,
            shuffle=True,
            deterministic=False,
            rows=range(tasks),
            stages=(ROLLOUT, REFERENCE),
        )
        self.machine = Scheduler(self.plan, lease_s=1e9, incarnation=1)
        self.clears: list[SendClear] = []
        self.calls = 0
        # The number of steps matches the number of tasks, because consumed tasks are not replaced.
        self.take(self.machine.begin(Configure(steps, 3, 2, True), 0.0))
        for service in ("batch-store", *STAGES):
            self.ask(registration(service, 1))
        self.ask(GetRunInfo(driver=1))
        self.ask(PublishWeights(driver=1, ref=weights_ref(0, 0, CANARY)))

    def take(self, effects: list[Effect]) -> Any:
        self.clears += [effect for effect in effects if isinstance(effect, SendClear)]
        return next((effect.body for effect in effects if isinstance(effect, Answer) and effect.ref == "call"), None)

    def ask(self, request: Any) -> Any:
        self.calls += 1
        return self.take(self.machine.handle(Asked("call", request, 1e9, (1, self.calls)), 0.0))

    def acknowledge(self) -> None:
        while self.clears:
            sent = self.clears.pop(0)
            self.take(self.machine.handle(ClearDone(sent.store, len(sent.tasks)), 0.0))


def measure_state(tasks: int) -> Figures:
    """Measure the leasing, rollout, training and collection of `tasks` live tasks (a multiple of STEP_TASKS)."""
    gc.collect()
    before = psutil.Process().memory_info().rss
    load = StateLoad(tasks)
    chance = np.random.default_rng(1)
    slowest = 0.0

    def timed(request: Any) -> Any:
        nonlocal slowest
        began = time.perf_counter()
        answer = load.ask(request)
        slowest = max(slowest, time.perf_counter() - began)
        return answer

    singles = min(SINGLES, tasks // 4) // BLOCK * BLOCK
    lease_s = result_s = 0.0
    for _ in range((tasks - singles) // BLOCK):
        for stage in STAGES:
            began = time.perf_counter()
            grant = timed(lease_request(1, BLOCK, stage))
            lease_s += time.perf_counter() - began
            request = result_of(grant, 1, chance)
            began = time.perf_counter()
            timed(request)
            result_s += time.perf_counter() - began
    began = time.perf_counter()
    grants = [timed(lease_request(1, 1)) for _ in range(singles)]
    single_s = time.perf_counter() - began
    for grant in grants:
        timed(result_of(grant, 1, chance))
    for _ in range(singles // BLOCK):
        timed(result_of(timed(lease_request(1, BLOCK, STAGES[1])), 1, chance))
    del grants
    gc.collect()
    grown = psutil.Process().memory_info().rss - before
    began = time.perf_counter()
    for step in range(1, tasks // STEP_TASKS + 1):
        assert timed(NextBatch(driver=1, step=step)) is not None
        timed(CommitStep(driver=1, step=step, metrics={}))
        load.acknowledge()
    collect_s = time.perf_counter() - began
    assert load.machine.run.tasks.counts[TaskState.COLLECTED] == tasks
    in_batches = len(STAGES) * (tasks - singles)
    return Figures(
        tasks,
        grown / tasks,
        in_batches / lease_s,
        in_batches / result_s,
        singles / single_s,
        tasks / collect_s,
        slowest,
    )


# ---------------------------------------------------------------------------------------------- over the socket


TOPOLOGY = """\
run: {{name: load, steps: {steps}, seed: 1}}
policy: {{model: {model}, dtype: float32}}
data: {{train: {{source: "builtin:addition", max_prompt_tokens: 8}}}}
reward: {{function: "builtin:exact_match"}}
sampling: {{max_new_tokens: 8}}
staleness: {staleness}
algorithm:
  tasks_per_step: {tasks}
  group_size: {group}
  advantage: {{name: grpo}}
  kl: {{estimator: k3, in: loss, coef: 0.001}}
optimizer: {{name: adamw, lr: 1.0e-3}}
lease: {{lease_s: 600}}
gc: {{after: commit}}
services: {{batch-store: {{memory: 4TiB}}, rollout: {{block_tasks: {block}}}}}
"""


def make_run(folder: Path, tasks: int) -> RunDir:
    """Create a run whose admission allows `tasks` tasks to be live at once."""
    from safetensors.numpy import save_file

    model = folder / "model"
    model.mkdir()
    save_file({"w": np.zeros((4, 4), np.float32)}, model / "model.safetensors")
    (model / "config.json").write_text("{}")
    run = RunDir.create(folder / "run")
    steps = tasks // STEP_TASKS
    text = TOPOLOGY.format(steps=steps, staleness=steps - 1, tasks=STEP_TASKS, group=GROUP, block=BLOCK, model=model)
    run.topology.write_text(text)
    return run


class SocketLoad:
    """Load over a socket: all actors except the scheduler, on one event loop."""

    def __init__(self, run: RunDir) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.life = new_incarnation()
        self.client = Client(self.context, run.endpoint("scheduler", 0), "scheduler/0", self.life)
        self.store = Mailbox("batch-store/0", new_incarnation())
        self.store.handle(Clear, self._clear)
        self.store.handle(GetInventory, self._inventory)
        self.store.bind(self.context, run.endpoint("batch-store", 0))
        self.cleared = 0
        self.grown = asyncio.Event()
        self.slowest_s = 0.0

    def _clear(self, request: Clear, call: Call) -> Ack:
        self.cleared += sum(task.task_id.startswith("train/") for task in request.tasks)
        self.grown.set()
        return Ack()

    def _inventory(self, request: GetInventory, call: Call) -> Inventory:
        return Inventory(tasks=[], cursor=0)

    async def ask(self, request: Any, reply: Any) -> Any:
        """Send one request, repeating a long poll that found nothing."""
        while True:
            began = time.perf_counter()
            try:
                answer = await self.client.call(request, reply, deadline_s=CALL_S)
            except RpcError as error:
                if error.code != ErrorCode.NOT_READY:
                    raise
                continue
            self.slowest_s = max(self.slowest_s, time.perf_counter() - began)
            return answer

    async def join(self) -> None:
        for service in ("batch-store", *STAGES):
            await self.ask(registration(service, self.life), Registered)
        await self.ask(GetRunInfo(driver=self.life), RunInfo)
        await self.ask(PublishWeights(driver=self.life, ref=weights_ref(0, 0, CANARY)), Ack)

    async def close(self) -> None:
        await self.store.close()
        self.client.close()
        self.context.term()


async def at_once(count: int, width: int, work: Callable[[], Awaitable[Any]]) -> list[Any]:
    """Do `work` `count` times, `width` at a time."""
    left = count
    done: list[Any] = []

    async def lane() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            done.append(await work())

    await asyncio.gather(*(lane() for _ in range(width)))
    return done


@contextlib.asynccontextmanager
async def scheduler_process(run: RunDir) -> AsyncIterator[psutil.Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "services.scheduler", "--run", str(run.path))
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        await process.wait()


async def _resident_bytes(run: RunDir) -> int:
    """Return the resident bytes of a scheduler that has just begun this run."""
    async with scheduler_process(run) as process:
        load = SocketLoad(run)
        try:
            await load.join()
            return int(process.memory_info().rss)
        finally:
            await load.close()
            run.remove_volatile()


async def _settled(process: psutil.Process) -> int:
    """Return the resident bytes once any snapshot in progress is on disk."""
    lowest, since = int(process.memory_info().rss), 0
    while since < SETTLE_ROUNDS:
        await asyncio.sleep(SETTLE_S)
        now = int(process.memory_info().rss)
        since = 0 if now < lowest else since + 1
        lowest = min(lowest, now)
    return lowest


async def _measure_socket(run: RunDir, tasks: int, before: int) -> Figures:
    chance = np.random.default_rng(1)
    singles = min(SINGLES, tasks // 4) // BLOCK * BLOCK
    lease_s = result_s = 0.0
    load = SocketLoad(run)

    def leases(count: int, width: int, most: int, stage: str) -> Awaitable[list[LeaseGrant]]:
        return at_once(count, width, lambda: load.ask(lease_request(load.life, most, stage), LeaseGrant))

    async def complete(grants: list[LeaseGrant], width: int) -> float:
        requests = [result_of(grant, load.life, chance) for grant in grants]
        began = time.perf_counter()
        await at_once(len(requests), width, lambda: load.ask(requests.pop(), CompleteAck))
        return time.perf_counter() - began

    try:
        async with scheduler_process(run) as process:
            await load.ask(GetStatus(), Status)
            load.slowest_s = 0.0  # The start of the process is excluded.
            await load.join()
            blocks = (tasks - singles) // BLOCK
            while blocks:
                some = min(blocks, 40)
                blocks -= some
                for stage in STAGES:
                    began = time.perf_counter()
                    grants = await leases(some, 4, BLOCK, stage)
                    lease_s += time.perf_counter() - began
                    result_s += await complete(grants, 4)
            began = time.perf_counter()
            grants = await leases(singles, IN_FLIGHT, 1, STAGES[0])
            single_s = time.perf_counter() - began
            await complete(grants, IN_FLIGHT)
            await complete(await leases(singles // BLOCK, 4, BLOCK, STAGES[1]), 4)
            slowest_s = load.slowest_s
            grown = await _settled(process) - before
        began = time.perf_counter()
        async with scheduler_process(run):
            await load.ask(GetStatus(), Status)
            restart_s = time.perf_counter() - began
            load.slowest_s = 0.0
            began = time.perf_counter()
            for step in range(1, tasks // STEP_TASKS + 1):
                await load.ask(NextBatch(driver=load.life, step=step), StepBatch)
                await load.ask(CommitStep(driver=load.life, step=step, metrics={}), Ack)
            async with asyncio.timeout(CALL_S):
                while load.cleared < tasks:
                    load.grown.clear()
                    await load.grown.wait()
            collect_s = time.perf_counter() - began
    finally:
        await load.close()
    run.remove_volatile()
    in_batches = len(STAGES) * (tasks - singles)
    return Figures(
        tasks,
        grown / tasks,
        in_batches / lease_s,
        in_batches / result_s,
        singles / single_s,
        tasks / collect_s,
        max(slowest_s, load.slowest_s),
        restart_s,
    )


def measure_socket(tasks: int) -> Figures:
    """Measure what `measure_state` measures, but with the real process, its journal and its socket. The figures include
    the work of the measuring process."""
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder, "small"), Path(folder, "large")
        small.mkdir()
        large.mkdir()
        before = asyncio.run(_resident_bytes(make_run(small, STEP_TASKS)))
        return asyncio.run(_measure_socket(make_run(large, tasks), tasks, before))


def table(rows: list[Figures]) -> str:
    """Format figures as aligned text."""
    names = [field.name for field in fields(Figures)]
    cells = [names] + [[f"{getattr(row, name):,.6g}" for name in names] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def in_own_process(what: str, tasks: int) -> Figures:
    """Run a measurement in its own process, because memory that is reused from an earlier measurement would hide
    growth."""
    command = [sys.executable, "-m", "tests.bench.scheduler_load", f"--{what}", str(tasks)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=os.environ, timeout=1800)
    return Figures(**json.loads(done.stdout.splitlines()[-1]))


def main(arguments: list[str]) -> None:
    if arguments and arguments[0] in ("--state", "--socket"):
        measure = measure_state if arguments[0] == "--state" else measure_socket
        row = measure(int(arguments[1]))
        print(json.dumps({field.name: getattr(row, field.name) for field in fields(Figures)}))
        return
    sizes = [int(each) for each in arguments] or [12_500, 100_000]
    print(heading(versions(("pyzmq", "msgspec", "numpy"))))
    for what in ("state", "socket"):
        print(what)
        print(table([in_own_process(what, size) for size in sizes]))


if __name__ == "__main__":
    main(sys.argv[1:])

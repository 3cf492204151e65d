"""Tests that metrics.jsonl is a prefix of the journal's rows after any crash, and has all of them when no write is in
progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from proto.ids import new_incarnation
from proto.messages import (
    Ack,
    CheckpointSaved,
    CommitStep,
    GetRunInfo,
    PublishWeights,
    Register,
    Registered,
    RunInfo,
)
from services.scheduler import metrics_file
from services.scheduler.events import Answer, Fail
from services.scheduler.journal import Journal
from services.scheduler.metrics_file import MetricsFile, tidy
from services.scheduler.server import SchedulerService
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from tests.integration.scheduler.test_scheduler_service import CANARY, Scheduler, World
from tests.unit.scheduler.bench import STORE, Bench
from tests.weights_refs import weights_ref

TOPOLOGY = """\
run: {name: rows, steps: 100000, seed: 7}
policy: {model: MODEL}
data:
  train: {source: "builtin:addition", max_prompt_tokens: 8}
  eval: EVAL
reward: {function: "builtin:exact_match"}
sampling: {max_new_tokens: 8}
algorithm: {tasks_per_step: 4, group_size: 2}
optimizer: {lr: 1.0e-3}
"""
EVERY = 5
"""Steps between checkpoints."""


@pytest.fixture
def evaluation() -> str:
    return "{}"


@pytest.fixture
def run(tmp_path: Path, evaluation: str) -> Iterator[RunDir]:
    model = tmp_path / "model"
    model.mkdir()
    save_file({"w": np.zeros((4, 4), np.float32)}, model / "model.safetensors")
    (model / "config.json").write_text("{}")
    made = RunDir.create(tmp_path / "run", shm_root=tmp_path / "shm")
    made.topology.write_text(TOPOLOGY.replace("MODEL", str(model)).replace("EVAL", evaluation))
    yield made
    made.remove_volatile()


def journal_rows(run: RunDir) -> list[dict[str, Any]]:
    with contextlib.closing(sqlite3.connect(run.journal)) as db:
        rows = db.execute("SELECT row FROM rows ORDER BY step").fetchall()
    return [json.loads(tidy(row)) for (row,) in rows]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check_prefix(run: RunDir) -> None:
    written, journaled = lines(run.metrics), journal_rows(run)
    assert written == journaled[: len(written)]


def discarded(run: RunDir) -> list[dict[str, Any]]:
    return lines(run.path / "metrics.discarded.jsonl")


# -------------------------------------------------------------------------------- a kill at every possible point


class Killed(BaseException):
    """An exception that represents SIGKILL. The code under test does not catch it."""


class Kills:
    """A simulated kill before call number `at` or in the middle of it."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self) -> bool:
        self.left -= 1
        return self.left == 0


class Life:
    """One life of the scheduler without its mailbox; the journal and the files are real."""

    def __init__(self, run: RunDir) -> None:
        self.service = SchedulerService(run, 0)
        self.service._start = lambda work: work.close()  # type: ignore[method-assign,assignment]  # no store is there
        self.service.bind()

    def ask(self, request: Any) -> Any:
        call = _Call()
        self.service._ask(request, call)
        self.service._flush()
        if self.service._failed.done():
            self.service._failed.result()
        return call.answer

    async def end(self) -> None:
        self.service._effects.clear()
        self.service._discards.clear()
        await self.service.close()


class _Call:
    deadline = float("inf")
    incarnation = request_id = 0
    answer: Any = None

    def reply(self, body: Any) -> None:
        self.answer = body

    def fail(self, error: RpcError) -> None:
        self.answer = error


def store(data_id: str) -> Register:
    return Register(
        service="batch-store",
        instance=0,
        incarnation=new_incarnation(),
        pid=1,
        host="h",
        endpoint="",
        limit_bytes=1 << 30,
        data_id=data_id,
    )


def test_a_kill_at_any_point_in_a_rewind_neither_loses_nor_duplicates_a_row(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rewind discards the rows of steps 3 to 5."""

    async def scene() -> int:
        kills = 0
        for at in range(1, 100):
            for path in (run.metrics, run.journal, run.path / "metrics.discarded.jsonl"):
                for file in path.parent.glob(f"{path.name}*"):
                    file.unlink()
            life = Life(run)
            life.ask(store("first"))
            life.ask(GetRunInfo(driver=1))
            await _train(life, 5)
            life.ask(CheckpointSaved(driver=1, step=2, kept=[2]))
            before = lines(run.metrics)
            assert [row["step"] for row in before] == list(range(1, 6))
            with monkeypatch.context() as patched:
                _arm(patched, Kills(at))
                try:
                    life.ask(store("second"))
                    killed = False
                except Killed:
                    killed = True
            await life.end()
            check_prefix(run)
            life = Life(run)
            check_prefix(run)
            assert len(lines(run.metrics)) == len(journal_rows(run))
            life.ask(store("second"))
            assert lines(run.metrics) == journal_rows(run) == before[:2]
            assert discarded(run) == [{"lineage": 0, **row} for row in before[2:]]
            await life.end()
            kills += killed
            if not killed:
                return kills
        raise AssertionError("every attempt was killed")

    assert asyncio.run(scene()) >= 6


def test_rows_of_commits_lost_in_a_power_cut_are_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal ends with step 3 and the file with step 5; the repair is killed at every possible point."""
    rows = [json.dumps({"step": step, "loss": step / 2}) for step in range(1, 6)]
    path = tmp_path / "metrics.jsonl"
    kept = tmp_path / "metrics.discarded.jsonl"
    for at in range(1, 100):
        path.write_text("".join(f"{row}\n" for row in rows))
        kept.unlink(missing_ok=True)
        with monkeypatch.context() as patched:
            _arm(patched, Kills(at))
            try:
                MetricsFile(path, lambda step: rows[step:3], 3, 2).close()
                killed = False
            except Killed:
                killed = True
        MetricsFile(path, lambda step: rows[step:3], 3, 2).close()
        assert path.read_text().splitlines() == rows[:3]
        assert lines(kept) == [{"lineage": 2, **json.loads(row)} for row in rows[3:]]
        if not killed:
            assert at > 6
            return
    raise AssertionError("every attempt was killed")


async def _train(life: Life, steps: int) -> None:
    machine = life.service._state
    bench = Bench.__new__(Bench)
    bench.machine, bench.lineage, bench.calls, bench.effects, bench.journal = machine, 0, 0, [], []
    bench.now = asyncio.get_running_loop().time()
    keep = bench._keep

    def served(effects: Any) -> Any:
        life.service._take([effect for effect in effects if not isinstance(effect, Answer | Fail)])
        life.service._flush()
        return keep(effects)

    bench._keep = served  # type: ignore[method-assign]
    bench.publish(0)
    for step in range(1, steps + 1):
        bench.step(step)


def _arm(patched: pytest.MonkeyPatch, kills: Kills) -> None:
    """Make `kills` count every system call on the metrics file, the middle of every write, and the commit."""

    def wrapped(real: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if kills():
                raise Killed
            return real(*arguments)

        return call

    def torn(descriptor: int, data: bytes) -> int:
        if kills():
            raise Killed
        if kills():
            os.write(descriptor, data[: len(data) // 2])
            raise Killed
        return os.write(descriptor, data)

    class Calls:
        def __getattr__(self, name: str) -> Any:
            real = getattr(os, name)
            if name == "write":
                return torn
            return wrapped(real) if name in ("open", "fsync", "ftruncate", "pread", "fstat") else real

    patched.setattr(metrics_file, "os", Calls())
    patched.setattr(Journal, "commit", wrapped(Journal.commit))


# ------------------------------------------------------------------------------------------------- ends at random


class Driving:
    """A driver that saves a checkpoint every few steps and records the commit number of each step."""

    def __init__(self) -> None:
        self.saved: list[int] = []
        self.commits = 0
        self.made: dict[int, int] = {}
        self.discarded = 0
        """Committed steps that were rolled back."""

    async def drive(self, world: World) -> None:
        """Train until cancelled."""
        client, driver = world.client()
        info = await client.call(GetRunInfo(driver=driver), RunInfo, deadline_s=20)
        self.saved = [step for step in self.saved if step <= info.committed_step]
        loaded = self.saved[-1] if self.saved else 0
        again = GetRunInfo(driver=driver, reload=True, loaded_step=loaded)
        info = await client.call(again, RunInfo, deadline_s=20)
        assert info.committed_step == loaded
        for step in [step for step in self.made if step > info.committed_step]:
            del self.made[step]
            self.discarded += 1
        step = info.committed_step
        await publish(client, driver, info.lineage, step)
        while True:
            step += 1
            await world.next_batch(client, driver, step)
            self.commits += 1
            self.made[step] = self.commits
            metrics = {"loss/policy": float(self.commits)}
            await client.call(CommitStep(driver=driver, step=step, metrics=metrics), Ack, deadline_s=20)
            await publish(client, driver, info.lineage, step)
            if step % EVERY == 0:
                self.saved = [*self.saved, step][-2:]
                await client.call(CheckpointSaved(driver=driver, step=step, kept=self.saved), Ack, deadline_s=20)


async def publish(client: Client, driver: int, lineage: int, step: int) -> None:
    ref = weights_ref(lineage, step, CANARY, drill_seed=1, nbytes=64, store=STORE)
    await client.call(PublishWeights(driver=driver, ref=ref), Ack, deadline_s=20)


async def live(run: RunDir, scheduler: Scheduler, driving: Driving, steps: int, chance: random.Random) -> None:
    """Run one life of the scheduler, beginning with empty stores: `steps` more steps, then a kill at a random
    moment.
    """
    world = World(run)
    try:
        client, incarnation = world.client()
        request = store(f"{incarnation}")
        await client.call(request, Registered, deadline_s=20)
        tasks = [asyncio.create_task(world.work("rollout", instance)) for instance in (0, 1)]
        world.tasks += [*tasks, asyncio.create_task(driving.drive(world))]
        until = driving.commits + steps
        async with asyncio.timeout(60):
            while driving.commits < until:
                done, _ = await asyncio.wait(world.tasks, timeout=0.002, return_when="FIRST_COMPLETED")
                for task in done:
                    task.result()
        await asyncio.sleep(chance.uniform(0, 0.05))  # The kill occurs at a random point in the following steps.
        scheduler.kill()
    finally:
        await world.close()


@pytest.mark.parametrize("evaluation", ['{held: {source: "builtin:addition?split=test", every: 3, rows: 10}}'])
@pytest.mark.parametrize("ends", [3, pytest.param(20, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def test_metrics_are_the_first_rows_of_the_journal_after_any_crash(run: RunDir, ends: int) -> None:
    """Setting ENDS_SEED to the printed number repeats the kills of a failed run."""
    seed = int(os.environ.get("ENDS_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"ENDS_SEED={seed}")
    chance, driving, scheduler = random.Random(seed), Driving(), Scheduler(run)
    for _ in range(ends):
        scheduler.start()
        asyncio.run(live(run, scheduler, driving, chance.randrange(2, 3 * EVERY), chance))
        check_prefix(run)
    scheduler.start()
    asyncio.run(settled(run))
    assert scheduler.stop() == 0
    written = lines(run.metrics)
    assert written == journal_rows(run)
    assert [row["step"] for row in written] == list(range(len(written)))
    # A commit that was not acknowledged may be missing; in that case its step was trained again or not at all.
    assert all(row["loss/policy"] <= driving.commits for row in written[1:])
    lost = Counter((row["lineage"], row["step"]) for row in discarded(run))
    assert set(lost.values()) <= {1}
    # If there are only a few kills, all of them might occur right after a checkpoint and discard nothing.
    assert len(lost) > ends or ends < 20
    kept = {row["loss/policy"] for row in written[1:]}
    assert not kept & {row["loss/policy"] for row in discarded(run) if row["step"] > 0}


async def settled(run: RunDir) -> None:
    """Wait until the scheduler has read its journal and the store has registered again."""
    world = World(run)
    try:
        client, incarnation = world.client()
        await client.call(store(f"{incarnation}"), Registered, deadline_s=20)
    finally:
        await world.close()

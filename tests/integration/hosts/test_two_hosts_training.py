"""Tests a store that serves a trainer's worker on another host, which has joined with an access file, over an encrypted
link that loses 2% of its packets. The worker must compute the same results as one on the store's host.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import zmq

from proto.messages import Ping, Pong
from shared.rundir import RunDir
from shared.security import keys
from shared.security.access import Access
from shared.security.roles import Role
from tests.integration.policy_trainer import test_trainer_worker as trainer
from tests.integration.store_process import REPOSITORY, STORE
from tests.integration.two_hosts import READER_ADDRESS, STORE_ADDRESS, Hosts, inside, two_hosts, with_own_memory
from tests.unit.policy_trainer.training import adamw

SCHEDULER = f"tcp://{STORE_ADDRESS}:17411"
STEPS = 4
START_S = 90.0


@contextlib.contextmanager
def started(host: list[str], service: str, run: RunDir, *words: str) -> Iterator[None]:
    command = [*host, sys.executable, "-m", f"services.{service}", "--run", str(run.path), *words]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait(10)


def joined(run: RunDir, folder: Path) -> RunDir:
    """Create the run directory that `ctl join` creates from an access file."""
    endpoints = {name: SCHEDULER for name in ("scheduler", "supervisor", "monitor")}
    access = Access(run.name, keys.load(run.keys, Role.SERVICE), endpoints, run.topology.read_text())
    return RunDir.join(folder / "joined", access, shm_root=folder / "away")


@contextlib.asynccontextmanager
async def bench_of(run: RunDir) -> AsyncIterator[trainer.Bench]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    bench = trainer.Bench(run, context, trainer.WORKER)
    try:
        yield bench
    finally:
        bench.data.close()
        for client in bench._clients.values():
            client.close()
        await asyncio.to_thread(context.term)


async def train(
    home: trainer.Bench, place: trainer.Bench, fence: int, enough: Callable[[int], bool]
) -> list[dict[str, float]]:
    """Train the worker of `place` on batches in the store of `home` until `enough(steps)` is true. Return the sums for
    each step.

    The tasks of these batches are unknown to the scheduler, which clears them at its next inventory. Each pass
    therefore needs its own `fence`.
    """
    await place.client(trainer.WORKER).call(Ping(), Pong, deadline_s=START_S)
    workers = await place.driver(5)
    await workers.init_model()
    sums: list[dict[str, float]] = []
    while not enough(len(sums)):
        batch = await home.batch(len(sums) + 1, fence=fence)
        done, _ = await asyncio.gather(
            workers.forward_backward(batch, trainer.ROLLOUT_ANCHOR), workers.optim_step(adamw())
        )
        sums.append(done.sums)
    return sums


def test_a_worker_on_another_host_trains_like_a_worker_on_the_stores_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "PROMPT", 250)  # larger shards: 40 kB per step
    run = trainer.made_run(tmp_path)
    away = joined(run, tmp_path)

    async def scenario(hosts: Hosts) -> None:
        async with bench_of(run) as home, bench_of(away) as other:
            await home.client(STORE).call(Ping(), Pong, deadline_s=START_S)
            hosts.lose_packets(0.02)
            with started(
                with_own_memory(hosts.reader),
                "policy_trainer.worker",
                away,
                "--listen",
                f"tcp://{READER_ADDRESS}:0",
            ):
                there = await train(home, other, 1, lambda done: done >= STEPS and hosts.lost() > 0)
            with started(inside(hosts.store), "policy_trainer.worker", run):
                here = await train(home, home, 2, lambda done: done == len(there))
            assert there == here
            assert all(sums["tokens"] > 0 for sums in here)
            print(f"{len(there)} steps, {hosts.lost()} packets lost")

    try:
        with (
            two_hosts() as hosts,
            started(inside(hosts.store), "scheduler", run, "--listen", SCHEDULER),
            started(inside(hosts.store), "batch_store", run, "--listen", f"tcp://{STORE_ADDRESS}:0"),
        ):
            asyncio.run(scenario(hosts))
    finally:
        away.remove_volatile()
        run.remove_volatile()

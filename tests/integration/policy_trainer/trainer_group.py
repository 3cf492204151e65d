"""Worker processes of one group, restarted as the supervisor would restart them, for tests with several ranks."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from services.policy_trainer.dispatch import WorkerDispatch
from shared.ranks.layout import Layout
from shared.rundir import RunDir
from tests.integration.forks import Fork, forked
from tests.integration.policy_trainer.test_trainer_worker import Bench
from tests.integration.store_process import StoreProcess

POLL_S = 0.1


class WorkerGroup:
    """Processes of ranks 0 to n-1 of `run`. `keep_alive` restarts a rank that has exited."""

    def __init__(self, run: RunDir, ranks: int) -> None:
        self._run = run
        self.processes: list[Fork] = []
        self.restarts = [0] * ranks
        self.statuses: list[list[int]] = [[] for _ in range(ranks)]
        """Exit statuses of the processes of each rank, in order."""
        for rank in range(ranks):
            self.processes.append(self._start(rank))

    def _start(self, rank: int) -> Fork:
        words = ("--run", str(self._run.path), "--instance", str(rank))
        with (self._run.path / f"worker-{rank}.txt").open("ab") as output:
            return forked("services.policy_trainer.worker", *words, output=output)

    async def keep_alive(self) -> None:
        while True:
            for rank, process in enumerate(self.processes):
                status = process.poll()
                if status is not None:
                    self.statuses[rank].append(status)
                    self.restarts[rank] += 1
                    self.processes[rank] = self._start(rank)
            await asyncio.sleep(POLL_S)  # This is the interval at which a supervisor polls; no test waits for it.

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].wait(10)

    def stop(self, rank: int) -> None:
        self.processes[rank].send_signal(signal.SIGSTOP)

    def said(self, rank: int) -> str:
        return (self._run.path / f"worker-{rank}.txt").read_text()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(10)


@contextmanager
def group_of(run: RunDir, ranks: int, *overrides: str) -> Iterator[WorkerGroup]:
    """Start a store and `ranks` workers; `overrides` are entries for services.policy-trainer."""
    text = run.topology.read_text()
    options = ", ".join([f"workers: {ranks}", *overrides])
    run.topology.write_text(text.replace("services: {", f"services: {{policy-trainer: {{{options}}}, "))
    store = StoreProcess(run)
    store.start()
    group = WorkerGroup(run, ranks)
    try:
        yield group
    finally:
        group.end()
        store.kill()
        run.topology.write_text(text)


async def driver_of(bench: Bench, layout: Layout, incarnation: int) -> WorkerDispatch:
    """Return the dispatch of a driver that has taken all ranks over."""
    clients = [bench.client(f"policy-trainer-worker/{rank}") for rank in range(layout.world_size)]
    workers = WorkerDispatch(clients, layout, incarnation)
    await workers.take_over()
    return workers

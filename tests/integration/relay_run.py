"""A run whose stores relay weights: the scheduler and the trainer's store on the home host, and one store on each other
host.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from proto.messages import Ack, BatchMeta, Clear, Held, Hold, PutTask, TaskHandle
from proto.tensors import Array
from shared.dataplane.client import TaskShards
from shared.rpc.client import Client
from shared.rundir import RunDir, service_name
from shared.security import keys
from shared.security.access import Access
from shared.security.roles import Role
from tests.integration.star import Host
from tests.integration.store_process import REPOSITORY, STORE, make_run, peer_of
from tests.integration.tiny.harness import environment

PORT = 7751
WITHIN_S = 60.0
VERSION = PutTask("weights/0/1", 1)


def weights_of(nbytes: int, seed: int = 5, rows: int = 16) -> dict[str, Array]:
    """Return random weights of about `nbytes` bytes."""
    rng = np.random.default_rng(seed)
    return {f"layer.{i}": rng.standard_normal(nbytes // rows // 4).astype(np.float32) for i in range(rows)}


def same(found: dict[str, Array], expected: dict[str, Array]) -> bool:
    return found.keys() == expected.keys() and all(np.array_equal(found[key], expected[key]) for key in expected)


@dataclass
class RelayRun:
    """The processes and directories of one run. Host 0 is home."""

    hosts: Sequence[Host]
    home: RunDir
    away: list[RunDir]
    scheduler: subprocess.Popen[bytes] | None = None
    stores: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run_of(self, host: int) -> RunDir:
        return self.away[host - 1] if host else self.home

    def start(self, module: str, *arguments: str, host: int, port: int = 0) -> subprocess.Popen[bytes]:
        listen = f"tcp://{self.hosts[host].address}:{port}"
        words = ["-m", module, *arguments, "--run", str(self.run_of(host).path), "--listen", listen]
        return subprocess.Popen(
            self.hosts[host].command(sys.executable, *words),
            cwd=REPOSITORY,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def start_store(self, host: int, module: str = "services.batch_store") -> None:
        self.stores[host] = self.start(module, "--instance", str(host), host=host)

    def kill_store(self, host: int) -> None:
        self.stores[host].kill()
        self.stores.pop(host).wait(10)

    def log_of(self, host: int) -> str:
        """Return the log of a host's store."""
        return self.run_of(host).log_file("batch-store", host).read_text()

    async def put(self, weights: dict[str, Array], version: PutTask = VERSION) -> None:
        """Put a version into the trainer's store."""
        async with peer_of(self.home) as peer:
            task = TaskShards(version.task_id, version.fence, weights)
            await peer.data.put([task], store=STORE, deadline_s=WITHIN_S)

    @asynccontextmanager
    async def client(self, host: int) -> AsyncIterator[Client]:
        """Connect to a host's store as a service on that host does."""
        async with peer_of(self.run_of(host), host) as peer:
            yield peer.store

    async def held(self, host: int, version: PutTask = VERSION) -> Held:
        """Make a host's store fetch a version, and return at once how much of it that store already has."""
        async with self.client(host) as client:
            return await client.call(Hold(task=version, origin=STORE), Held, deadline_s=WITHIN_S)

    async def take(self, host: int, version: PutTask = VERSION) -> tuple[dict[str, Array], float]:
        """Fetch a version from a host's store as the rollouts on that host do. Return the version and the number of
        seconds until that store had it.
        """
        began = time.monotonic()
        async with peer_of(self.run_of(host), host) as peer:
            name = service_name("batch-store", host)
            await peer.data.hold(version, store=name, origin=STORE, stall_s=WITHIN_S)
            seconds = time.monotonic() - began
            (found,) = await peer.data.fetch(_meta(version, name), (), deadline_s=WITHIN_S)
            return found, seconds

    async def ready(self, host: int) -> None:
        """Wait until a host's store answers."""
        async with self.client(host):
            pass

    async def clear(self, host: int, version: PutTask) -> None:
        """Clear a version in a host's store."""
        async with self.client(host) as client:
            await client.call(Clear(tasks=[version]), Ack, deadline_s=WITHIN_S)

    async def chained(self, hosts: Sequence[int]) -> None:
        """Wait until the scheduler has told the store on each of these hosts what its predecessors are."""
        for host in hosts:
            await self.ready(host)
            await self.told(host, [service_name("batch-store", each) for each in reversed(hosts) if each < host][:2])

    async def told(self, host: int, expected: list[str]) -> None:
        """Wait until the scheduler has told a host's store that these are its predecessors."""
        async with asyncio.timeout(WITHIN_S):
            while _told(self.log_of(host)) != expected:
                await asyncio.sleep(0.05)


@contextlib.contextmanager
def relay_run(
    folder: Path, hosts: Sequence[Host], *, memory: int = 256 << 20, scheduler: Sequence[str] = ("services.scheduler",)
) -> Iterator[RelayRun]:
    """Start the scheduler and the store on the home host, which is the first host. The test starts the other
    stores.

    `scheduler` is the scheduler's module, followed by its arguments.
    """
    home = make_run(folder, memory=memory)
    access = Access(
        "run",
        keys.load(home.keys, Role.SERVICE),
        {"scheduler": f"tcp://{hosts[0].address}:{PORT}"},
        home.topology.read_text(),
    )
    away = [RunDir.join(folder / f"away-{i}", access) for i in range(1, len(hosts))]
    made = RelayRun(hosts, home, away)
    made.scheduler = made.start(*scheduler, host=0, port=PORT)
    made.start_store(0)
    try:
        yield made
    finally:
        for process in [*made.stores.values(), made.scheduler]:
            process.kill()
            process.wait(10)
        for run in (home, *away):
            run.remove_volatile()


def _told(log: str) -> list[str]:
    """Return the predecessors that the scheduler last reported to a store."""
    rows = [json.loads(line) for line in log.splitlines()]
    told = [row["stores"] for row in rows if row["event"] == "weights come from"]
    return told[-1] if told else []


def _meta(version: PutTask, store: str) -> BatchMeta:
    return BatchMeta(tasks=[TaskHandle(task_id=version.task_id, fence=version.fence, stores=[0])], stores=[store])

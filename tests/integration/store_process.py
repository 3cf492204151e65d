"""A real store process on its own run directory, and real clients for it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import zmq
from safetensors.numpy import save_file

from proto.ids import new_incarnation
from proto.messages import Ping, Pong
from shared.dataplane.client import DataClient
from shared.rpc.client import Client
from shared.rundir import RunDir, service_name

STORE = "batch-store/0"
REPOSITORY = Path(__file__).parents[2]
S = TypeVar("S", bound="StoreProcess")


@contextmanager
def ending(process: S) -> Iterator[S]:
    """Kill the process afterwards if it is still running, and remove its shared memory."""
    try:
        yield process
    finally:
        if process.process is not None and process.process.poll() is None:
            process.kill()
        process.run.remove_volatile()


def make_run(
    folder: Path, *, memory: int, shm_root: Path = Path("/dev/shm"), spill: Path | None = None, spill_limit: int = 0
) -> RunDir:
    """Make a run directory with a minimal topology whose store holds `memory` bytes and can spill `spill_limit`
    more.
    """
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    save_file({"w": np.zeros(1, np.float32)}, model / "model.safetensors")
    run = RunDir.create(folder / "run", shm_root=shm_root)
    extra = f", spill: {spill}, spill_limit: {spill_limit}" if spill is not None else ""
    run.topology.write_text(
        "run: {name: store-test, steps: 1}\n"
        f"policy: {{model: {model}, dtype: float32}}\n"
        'data: {train: {source: "builtin:addition"}}\n'
        'reward: {function: "builtin:exact_match"}\n'
        "sampling: {max_new_tokens: 8}\n"
        "algorithm: {tasks_per_step: 2, group_size: 2, advantage: {name: grpo}}\n"
        "optimizer: {name: adamw, lr: 1.0e-4}\n"
        f"services: {{batch-store: {{memory: {memory}{extra}}}}}\n"
    )
    return run


@dataclass
class StoreProcess:
    """One instance of the store of `run`, which a test starts, kills and restarts."""

    run: RunDir
    process: subprocess.Popen[bytes] | None = None
    killed: int = field(default=0)
    instance: int = 0
    module: str = "services.batch_store"
    """Module to start, either the store or a test's store with a defect."""

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", self.module),
                *("--run", str(self.run.path), "--instance", str(self.instance)),
            ],
            cwd=REPOSITORY,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        self.killed += 1

    def stop(self) -> int:
        """Send SIGTERM and return the exit status."""
        assert self.process is not None
        self.process.terminate()
        status = self.process.wait(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status


@dataclass
class Peer:
    """A bus client and a data client, like those of a service that uses the store."""

    store: Client
    data: DataClient


@asynccontextmanager
async def peer_of(run: RunDir, instance: int = 0) -> AsyncIterator[Peer]:
    """Connect to the store and wait until it answers."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    name = service_name("batch-store", instance)
    client = Client(context, run.endpoint("batch-store", instance), name, new_incarnation())
    data = DataClient(lambda service, instance: client)
    try:
        await client.call(Ping(), Pong, deadline_s=20)
        yield Peer(client, data)
    finally:
        data.close()
        client.close()
        await asyncio.to_thread(context.term)


def fill(path: Path, unit: int = 4096) -> None:
    """Append to `path`, `unit` bytes at a time, until its disk is full."""
    with path.open("ab", buffering=0) as stream, suppress(OSError):
        while stream.write(bytes(unit)):
            pass


def small_mount(folder: Path, nbytes: int) -> Iterator[Path]:
    """Mount an in-memory file system of `nbytes` bytes at `folder`."""
    import pytest  # The benchmarks use this module without pytest.

    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes},nr_inodes=1000", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=10)
    except FileNotFoundError:
        pytest.skip("no `mount` command")
    if done.returncode:
        pytest.skip(f"mounting a tmpfs is not allowed here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=10)

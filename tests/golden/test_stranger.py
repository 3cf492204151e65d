"""Checks that proto/SPEC.md is sufficient: a client written from it alone works with the real store, and our client
reads its shards."""

from __future__ import annotations

import ast
import asyncio
import json
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from proto.messages import BatchMeta, BatchPart, TaskHandle
from proto.tensors import Array
from shared.dataplane.client import TaskShards
from shared.rundir import RunDir
from shared.security import access, keys
from shared.security.access import Access
from shared.security.roles import Role
from tests.integration import store_process
from tests.integration.store_process import StoreProcess, peer_of
from tests.integration.store_scheduler import REPOSITORY, STORE, bench_of, make_run
from tests.keys import SAMPLED

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent
CLIENT = "stranger.py"
STRANGERS = (CLIENT, "stranger_works.py", "stranger_streams.py")
OURS = {folder.name for folder in REPOSITORY.iterdir() if (folder / "__init__.py").exists()}
CALL_S = 20.0
LIMIT_S = 60.0
LINES = 100


def stranger(program: str, *arguments: str) -> None:
    """Run a program from this folder in a different working directory, isolated from this process's Python environment
    (-I)."""
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(FOLDER)!r}); sys.argv = {[program, *arguments]!r}; "
        f"runpy.run_path({str(FOLDER / program)!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd="/", capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Exchange:
    """Shards that passed between a stranger's rollout, our reference and a stranger's readers."""

    put_by_stranger: dict[str, Array]
    """Shards, by key, that our reference read from the task that the stranger completed."""
    put_by_ours: Array
    """Log-probs that the reference put."""
    mapped: Array
    streamed: Array
    """Log-probs of the reference as the stranger read them."""
    done: int
    """Number of samples of that task in the scheduler's journal, according to the reference's lease."""


@pytest.fixture(scope="module")
def exchange(tmp_path_factory: pytest.TempPathFactory) -> Exchange:
    folder = tmp_path_factory.mktemp("stranger")
    run = make_run(folder, store="memory: 64MiB")
    # The strangers are new processes, which may start slowly on a busy machine, and nothing renews the leases in the
    # meantime.
    run.topology.write_text(run.topology.read_text().replace("lease_s: 2}", "lease_s: 60}"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        scheduler = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    endpoints = {"scheduler": scheduler, "supervisor": "tcp://127.0.0.1:1", "monitor": "tcp://127.0.0.1:1"}
    access.write(folder / "access", Access(run.name, keys.load(run.keys, Role.SERVICE), endpoints))
    return asyncio.run(_exchange(run, scheduler, folder))


async def _exchange(run: RunDir, scheduler: str, folder: Path) -> Exchange:
    doors = {"store": ("--listen", "tcp://127.0.0.1:0"), "scheduler": ("--listen", scheduler)}
    async with bench_of(run, **doors) as here:
        driver = await here.driver()
        await driver.publish(0)
        away = asyncio.to_thread
        await away(stranger, "stranger_works.py", str(here.run.path), str(folder / "made.json"))
        made = json.loads((folder / "made.json").read_text())
        reference = await here.actor("reference")
        grant = await reference.lease()
        assert grant is not None
        assert [(task.task_id, task.fence) for task in grant.batch.tasks] == [(made["task"], made["fence"])]
        [found] = await reference.data.fetch(grant.batch, list(SAMPLED), deadline_s=CALL_S)
        copied = {key: np.array(array) for key, array in found.items()}
        logprobs = np.linspace(-1, 0, 700_001, dtype=np.float32)  # The array fills three chunks of a stream.
        shards = TaskShards(made["task"], made["fence"], {"ref_logprobs": logprobs})
        await reference.data.put([shards], store=STORE, deadline_s=CALL_S)
        which = (made["task"], str(made["fence"]), "ref_logprobs")
        await away(stranger, CLIENT, "get", str(here.run.path), *which, str(folder / "mapped.npy"))
        await away(stranger, "stranger_streams.py", str(folder / "access"), *which, str(folder / "streamed.npy"))
        return Exchange(
            copied, logprobs, np.load(folder / "mapped.npy"), np.load(folder / "streamed.npy"),
            grant.batch.tasks[0].samples,
        )  # fmt: skip


def test_our_reference_reads_the_task_that_the_stranger_completed(exchange: Exchange) -> None:
    found = exchange.put_by_stranger
    assert exchange.done == 2
    np.testing.assert_array_equal(found["token_ids"], np.arange(1, 10, dtype=np.int32))
    np.testing.assert_array_equal(found["lengths"], np.array([5, 4], np.int32))
    mask = found["loss_mask"]
    assert mask.tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert found["rollout_logprobs"].tolist() == [-0.5 if each else 0.0 for each in mask]
    assert {key: array.dtype.name for key, array in found.items()} == {
        "token_ids": "int32", "lengths": "int32", "sample_index": "int32", "loss_mask": "uint8",
        "rollout_logprobs": "float32", "versions": "int32",
    }  # fmt: skip


def test_the_stranger_maps_a_shard_put_by_our_reference(exchange: Exchange) -> None:
    np.testing.assert_array_equal(exchange.mapped, exchange.put_by_ours)


def test_the_stranger_on_another_host_streams_a_shard_that_our_reference_put(exchange: Exchange) -> None:
    np.testing.assert_array_equal(exchange.streamed, exchange.put_by_ours)


def test_client_of_a_hundred_lines_puts_and_gets_a_shard(tmp_path: Path) -> None:
    """The client gets its own shard, and one of ours from a file with other shards. Each call runs in a separate
    process."""
    store = StoreProcess(store_process.make_run(tmp_path, memory=16 << 20))
    store.start()
    theirs = np.linspace(0, 1, 3 * 70_001, dtype=np.float32).reshape(3, 70_001)
    ours = [TaskShards(f"train/0/{i}", 4, {"a": np.arange(i), "b": np.full((2, i), i, np.int32)}) for i in range(5)]
    np.save(tmp_path / "theirs.npy", theirs)
    run, got = str(store.run.path), str(tmp_path / "got.npy")

    async def main() -> None:
        async with peer_of(store.run) as peer:
            await asyncio.to_thread(stranger, CLIENT, "put", run, "train/7/0", "2", "x", str(tmp_path / "theirs.npy"))
            meta = BatchMeta(
                tasks=[TaskHandle("train/7/0", 2, stores=[0])], parts=[BatchPart("s", ["x"])], stores=[STORE]
            )
            [found] = await peer.data.fetch(meta, ["x"], deadline_s=CALL_S)
            np.testing.assert_array_equal(found["x"], theirs, strict=True)
            await peer.data.put(ours, store=STORE, deadline_s=CALL_S)
            for task, fence, key, expected in (
                ("train/7/0", "2", "x", theirs),
                ("train/0/3", "4", "b", ours[3].shards["b"]),
            ):
                await asyncio.to_thread(stranger, CLIENT, "get", run, task, fence, key, got)
                np.testing.assert_array_equal(np.load(got), expected, strict=True)

    try:
        asyncio.run(main())
    finally:
        store.kill()
        store.run.remove_volatile()


def test_client_has_at_most_a_hundred_lines_and_needs_four_packages() -> None:
    source = (FOLDER / CLIENT).read_text()
    assert len(source.splitlines()) <= LINES
    assert max(map(len, source.splitlines())) <= 120
    assert packages(source) - sys.stdlib_module_names == {"zmq", "msgpack", "numpy", "xxhash"}


@pytest.mark.parametrize("program", STRANGERS)
def test_the_stranger_imports_none_of_our_packages(program: str) -> None:
    known = set(sys.stdlib_module_names) | {"zmq", "msgpack", "numpy", "xxhash", "cryptography", "stranger"}
    imported = packages((FOLDER / program).read_text())
    assert {"proto", "shared", "services", "launch", "tests"} <= OURS
    assert not imported & OURS
    assert imported <= known


def packages(source: str) -> set[str]:
    """Return the top-level names of all modules that a program imports."""
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level
            imported.add((node.module or "").partition(".")[0])
    return imported

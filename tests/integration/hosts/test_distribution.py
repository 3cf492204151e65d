"""Tests that hosts receive the model and the data of a run from the home host. Stores and agents are real."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.checks.distribution import take
from launch.commands import access as accesses
from proto.messages import ErrorCode
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from shared.security import keys
from shared.security.access import Access
from shared.security.roles import Role
from shared.topology import document, load
from tests.integration.hosts.ray_cluster import Told
from tests.integration.hosts.test_host_agent import on
from tests.integration.netns import two_hosts
from tests.integration.store_process import make_run, small_mount
from tests.integration.store_scheduler import Process
from tests.integration.tiny.harness import QUICKSTART, free_port, wait_for

LIMIT_S = 240.0
ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(20)]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[tuple[RunDir, Access]]:
    """A scheduler and a store. The model has a large file and an empty one, and the data consists of rows in a file."""
    run = make_run(tmp_path, memory=64 << 20)
    (tmp_path / "model" / "tokenizer.json").write_bytes(os.urandom(5_500_000))
    (tmp_path / "model" / "merges.txt").write_bytes(b"")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    text = run.topology.read_text().replace('"builtin:addition"', f'"jsonl:{tmp_path / "rows.jsonl"}"')
    run.topology.write_text(text.replace("dtype: float32", "dtype: float32, distribute: true"))
    sets = ["transport.listen=127.0.0.1", "placement.hosts={b: {}}", "monitor.warnings.off=[kl-blow-up]"]
    load(run.topology, sets).dump_resolved(run.topology)
    port = free_port()
    processes = [
        Process(run, "services.scheduler", ("--listen", f"tcp://127.0.0.1:{port}")),
        Process(run, "services.batch_store", ("--listen", "tcp://127.0.0.1:0")),
    ]
    endpoints = {"scheduler": f"tcp://127.0.0.1:{port}"}
    for process in processes:
        process.start()
    try:
        yield run, Access("run", keys.load(run.keys, Role.SERVICE), endpoints, run.topology.read_text())
    finally:
        for process in processes:
            process.kill()
        run.remove_volatile()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    yield from small_mount(tmp_path / "disk", 2 << 20)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_host_receives_the_files_from_home_and_its_topology_names_them(
    home: tuple[RunDir, Access], tmp_path: Path
) -> None:
    _, access = home
    folder = tmp_path / "host"
    taken = asyncio.run(take(access, folder, "b", lambda: False))
    assert contents(folder / "0" / "model") == contents(tmp_path / "model")
    assert (folder / "1" / "rows.jsonl").read_bytes() == (tmp_path / "rows.jsonl").read_bytes()
    named = document.plain(taken.topology)
    assert named["monitor"]["warnings"] == {"off": ["kl-blow-up"]}
    assert named["policy"]["model"] == str(folder / "0" / "model")
    assert named["data"]["train"]["source"] == f"jsonl:{folder / '1' / 'rows.jsonl'}"
    # a damaged file, an incomplete file and a file that is too long are repaired
    damaged = folder / "0" / "model" / "tokenizer.json"
    damaged.write_bytes(damaged.read_bytes()[:3_000_000] + bytes(2_500_000))
    (folder / "0" / "model" / "config.json").write_bytes(b"{")
    with (folder / "1" / "rows.jsonl").open("ab") as file:
        file.write(b"more")
    asyncio.run(take(access, folder, "b", lambda: False))
    assert contents(folder / "0" / "model") == contents(tmp_path / "model")
    assert (folder / "1" / "rows.jsonl").read_bytes() == (tmp_path / "rows.jsonl").read_bytes()


def test_a_host_that_is_told_to_stop_does_not_wait_for_the_files(home: tuple[RunDir, Access], tmp_path: Path) -> None:
    _, access = home
    with pytest.raises(RpcError) as ended:
        asyncio.run(take(access, tmp_path / "host", "b", lambda: True))
    assert ended.value.code == ErrorCode.DRAINING


def test_files_too_large_for_the_disk_are_refused(
    home: tuple[RunDir, Access], tmp_path: Path, small_disk: Path
) -> None:
    _, access = home
    with pytest.raises(RpcError, match=r"needs 5\.. MiB more .*, but the disk has [12]\.. MiB") as refused:
        asyncio.run(take(access, small_disk / "host", "b", lambda: False))
    assert refused.value.code == ErrorCode.BAD_REQUEST


@pytest.mark.long
@pytest.mark.timeout(600)
def test_agents_without_the_model_run_their_rollouts_with_their_own_copy(tmp_path: Path) -> None:
    path = tmp_path / "run"
    sets = [
        "placement.hosts={b: {}, c: {}}",
        "services.rollout={host: [b, c], instances: 2}",
        "policy.distribute=true",
        "run.steps=4",
        "data.eval={}",
        "services.batch-store.memory=256MiB",
    ]
    with two_hosts() as (home, away), contextlib.ExitStack() as stack:
        words = [word for each in [*sets, f"transport.listen={home.address}"] for word in ("--set", each)]
        launcher = stack.enter_context(on(home, "launch.cluster", str(QUICKSTART), "--run-dir", str(path), *words))
        told = Told(launcher)
        wait_for("the run directory", lambda: (path / "run.json").exists(), LIMIT_S)
        accesses.export(RunDir.open(path), Role.SERVICE, tmp_path / "file")
        agents = []
        for name in ("b", "c"):
            given = ("--access", str(tmp_path / "file"), "--name", name, "--run-dir", str(tmp_path / name))
            agents.append(stack.enter_context(on(away, "launch.host", *given)))
        for name in ("b", "c"):
            told.wait_for(f"host {name} has joined")
        launcher.wait(LIMIT_S)
        assert launcher.returncode == 0
        assert [agent.wait(LIMIT_S) for agent in agents] == [0, 0]
    model = load(path / "topology.yaml").policy.model
    for number, name in enumerate(("b", "c"), 1):
        assert "version relayed" in RunDir.open(tmp_path / name).log_file("batch-store", number).read_text()
        own = load(tmp_path / name / "topology.yaml").policy.model
        assert Path(own).is_relative_to(tmp_path / name)
        assert contents(Path(own)) == contents(Path(model))

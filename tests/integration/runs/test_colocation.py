"""Tests a run with policy, reference and engine on the same devices, in which each of them is killed during its turn
and one hangs. The results are bit-identical to those of the same run with separate devices.

Residency over time is read from the scheduler's log, which has one line for every change to its ledger.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shared.colocation.devices import FORBIDDEN
from tests.integration import parity_run as parity
from tests.integration.whole_cluster import Cluster, cluster

COLOCATE = Path(__file__).resolve().parents[3] / "launch" / "topologies" / "colocate.yaml"
STEPS = 14
LEASE_S = 5.0
CHEAP = [
    "run.deterministic=true",
    f"run.steps={STEPS}",
    "algorithm.tasks_per_step=16",
    "algorithm.group_size=4",
    "services.rollout.block_tasks=8",
    "services.batch-store.memory=256MiB",
    "data.eval.heldout.every=4",
    "data.eval.heldout.rows=64",
    "checkpoint.every=3",
    f"lease.lease_s={LEASE_S}",
]
ENGINE, WORKER, SCORER = "rollout/0", "policy-trainer-worker/0", "reference/0"
Change = tuple[str, frozenset[str], str]
"""A change to the ledger: the holder, the parts that it holds afterwards, and the phase."""
IN_STEP = [
    (WORKER, {"policy.gradients", "policy.parameters"}, "train"),
    (WORKER, {"policy.gradients", "policy.optimizer", "policy.parameters"}, "train"),
    (WORKER, {"policy.parameters"}, None),
    (ENGINE, {"engine.weights"}, "sync"),
    (WORKER, set(), None),
    (ENGINE, {"engine.kv_cache", "engine.weights"}, "generate"),
    (ENGINE, set(), None),
    (SCORER, {"reference.parameters"}, "score"),
    (SCORER, set(), None),
]


class Watched:
    """A run and the changes to its ledger so far."""

    def __init__(self, run: Cluster) -> None:
        self.run = run

    def lines(self) -> list[dict[str, Any]]:
        file = self.run.path / "logs" / "scheduler-0.jsonl"
        text = file.read_text() if file.exists() else ""
        whole = (json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines())
        return [line for line in whole if line["event"] in ("devices", "to be killed", "journal replayed")]

    def changes(self) -> list[Change]:
        return _changes(self.lines())

    def steps(self) -> int:
        return len(self.run.rows())

    def stopped_with(self, service: str, part: str) -> psutil.Process:
        """Stop the service (SIGSTOP) while the ledger says that it holds `part`; return its process."""

        def attempt() -> psutil.Process | None:
            if self._holds(f"{service}/0", part):
                pid = self._pid(service)
                if pid is not None:
                    os.kill(pid, signal.SIGSTOP)
                    if self._holds(f"{service}/0", part):
                        return psutil.Process(pid)
                    os.kill(pid, signal.SIGCONT)  # The process released the part before it was stopped.
            return None

        return self.run.wait_for(f"{service} with {part}", attempt)

    def _holds(self, holder: str, part: str) -> bool:
        mine = [parts for name, parts, _ in self.changes() if name == holder]
        return bool(mine) and part in mine[-1]

    def _pid(self, service: str) -> int | None:
        run = str(self.run.path)
        module = f"services.{'policy_trainer.worker' if service == 'policy-trainer-worker' else service}"
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                if run in command and module in command:
                    return process.pid
        return None


def _changes(lines: list[dict[str, Any]]) -> list[Change]:
    """Return the ledger changes of the scheduler's current life, which began with an empty ledger."""
    begun = max((i for i, line in enumerate(lines) if line["event"] == "journal replayed"), default=-1)
    return [_change(line) for line in lines[begun + 1 :] if line["event"] == "devices"]


def _change(line: dict[str, Any]) -> Change:
    return line["holder"], frozenset(line["holds"].split()), line["phase"]


def beside_one_another(lines: list[dict[str, Any]]) -> Iterator[frozenset[str]]:
    """Yield the parts on the devices after each change; each life of the scheduler begins with an empty ledger."""
    held: dict[str, frozenset[str]] = {}
    for line in lines:
        if line["event"] == "journal replayed":
            held = {}
        elif line["event"] == "devices":
            held[line["holder"]] = frozenset(line["holds"].split())
        yield frozenset().union(*held.values())


def forbidden(together: frozenset[str]) -> list[tuple[str, str]]:
    """Return the pairs from `together` that must not be on the devices at the same time."""
    return [pair for pair in FORBIDDEN if together.issuperset(pair)]


def in_order(changes: list[Change], wanted: list[tuple[str, set[str], str | None]]) -> bool:
    """Return whether `wanted` is a subsequence of `changes`."""
    left: Iterator[Change] = iter(changes)
    return all(
        any(holder == name and parts == there and phase in (None, now) for name, there, now in left)
        for holder, parts, phase in wanted
    )


@pytest.mark.timeout(400)
def test_colocated_run_survives_a_death_in_every_turn_and_a_hang(tmp_path: Path) -> None:
    with cluster(COLOCATE, tmp_path / "colocated", *CHEAP, limit_s=380) as run:
        watched = Watched(run)
        wait: Callable[[str, Callable[[], Any]], Any] = run.wait_for
        wait("three steps", lambda: watched.steps() >= 3)
        undisturbed = watched.changes()
        assert in_order(undisturbed, IN_STEP * 2)

        watched.stopped_with("rollout", "engine.kv_cache").kill()
        dead_at = watched.steps()
        wait("a step after the engine's death", lambda: watched.steps() > dead_at)
        scheduler = wait("the scheduler", lambda: run.pid("scheduler"))
        os.kill(scheduler, signal.SIGKILL)  # The ledger is not journaled; the processes report which parts they hold.
        dead_at = watched.steps()
        wait("a step after the scheduler's death", lambda: watched.steps() > dead_at)
        watched.stopped_with("policy-trainer-worker", "policy.gradients").kill()
        dead_at = watched.steps()
        wait("a step after the worker's death", lambda: watched.steps() > dead_at)

        hanging = watched.stopped_with("rollout", "engine.kv_cache")
        hung_at = len(watched.lines())
        wait("the end of the engine that hangs", lambda: not hanging.is_running())
        assert run.end() == 0
        lines, rows, status = watched.lines(), run.rows(), run.output()

    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["rollout/staleness_max"] == 0 for row in rows)
    assert {"eval/heldout/accuracy"} <= set(rows[3]) & set(rows[7]) & set(rows[-1])
    assert not [pair for together in beside_one_another(lines) for pair in forbidden(together)]
    assert "restart 1" in status
    # Between the hang and the kill nothing was granted, and the dead engine's parts were freed before the next grant.
    after = lines[hung_at:]
    assert after[0]["event"] == "to be killed"
    assert after[0]["name"] == ENGINE
    assert "engine.kv_cache" in after[0]["cause"]
    assert _change(after[1])[:2] == (ENGINE, frozenset())

    with cluster(COLOCATE, tmp_path / "apart", *CHEAP, "placement.colocate=[]", limit_s=200) as apart:
        assert apart.end() == 0, apart.output()
    assert not any("holder" in line for line in Watched(apart).lines())
    # Rewards, losses, gradient norms and weights are bit-identical.
    assert parity.differences(apart.path, run.path) == []
